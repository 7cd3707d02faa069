"""Where the tool keeps what it makes: the user's cache folder and state folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/ppdbench``; safe to remove, made again when needed."""
    return _base("XDG_CACHE_HOME", ".cache") / "ppdbench"


def state_folder() -> Path:
    """``$XDG_STATE_HOME/ppdbench/cluster``: which processes ``ppd cluster up`` started."""
    return _base("XDG_STATE_HOME", ".local/state") / "ppdbench" / "cluster"


def engine_folder() -> Path:
    """What ``scripts/engine`` makes; ``$PPD_ENGINE`` overrides it."""
    chosen = os.environ.get("PPD_ENGINE")
    return Path(chosen) if chosen else cache_folder() / "engine"


def _base(variable: str, below_home: str) -> Path:
    chosen = os.environ.get(variable)
    return Path(chosen) if chosen else Path.home() / below_home
