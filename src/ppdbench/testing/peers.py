"""Other people's tools, each in an environment of its own in the user's cache folder.

Their dependencies must not meet ours, and what is there is used again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ppdbench.cluster.folders import cache_folder
from ppdbench.core.errors import EngineError

INSTALL_LIMIT_S = 900.0
_SAID = 800


def peer_python(pin: str, say: Callable[[str], None]) -> Path:
    """The interpreter of an environment with ``pin``, as in ``vllm-router==0.1.17``.

    It is made on first use; one whose making was broken off is gone on with.

    Raises:
        EngineError: it cannot be made; says what the program that failed said.
    """
    folder = cache_folder() / pin.replace("==", "-")
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        say(f"making an environment with {pin} in {folder} (once, a few minutes)")
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(folder)], "make a virtual environment")
        quiet = ["--quiet", "--disable-pip-version-check"]
        _run([str(python), "-m", "pip", "install", *quiet, pin], f"install {pin}")
        ready.touch()
    return python


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(  # noqa: S603  (our own command lines)
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"could not {what}: {error}; try again") from error
    if done.returncode != 0:
        said = done.stderr.strip()[-_SAID:] or f"exit status {done.returncode}"
        raise EngineError(f"could not {what}; it said: {said}")
