"""Run folders, read for the builder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppdbench.core.errors import RunError
from ppdbench.table.inputs import RunInput


def read_runs(folders: Iterable[Path]) -> list[RunInput]:
    """Raises RunError for a folder that holds no finished run."""
    return [_read_run(folder) for folder in folders]


def _read_run(folder: Path) -> RunInput:
    manifest, points = (_read(folder / name) for name in ("manifest.json", "points.jsonl"))
    try:
        return RunInput(
            name=str(folder),
            digest="sha256:" + hashlib.sha256(points).hexdigest(),
            manifest=json.loads(manifest),
            points=[json.loads(line) for line in points.splitlines()],
            records=_no_records,
        )
    except ValueError as error:
        raise RunError(f"{folder} is damaged ({error}); finish it with --resume") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path}: {error.strerror}; give a folder that ppd sweep or ppd import wrote, "
            "finished with --resume if it was cut short"
        ) from error


def _no_records(key: object) -> Any:  # noqa: ANN401, ARG001
    return None
