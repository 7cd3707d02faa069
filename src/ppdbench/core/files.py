"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".part"
"""How the name of a file that is still being written ends."""


def write_whole(path: Path, content: bytes) -> None:
    """Temporary file in the same folder, fsync, rename: a reader sees all of it or nothing.

    The temporary name is new, so that two writers do not meet and nothing there is overwritten.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Differs for a file of other content; ``None`` where there is none.

    Modification time and size alone would not tell: files that were installed, or copied with
    their times, may share them. Nobody can set the time of the last change of state.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
