"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``PPD_CACHE``, else ``ppdbench`` under ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("PPD_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ppdbench"
