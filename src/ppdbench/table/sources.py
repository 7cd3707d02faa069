"""Run folders, read for the builder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ppdbench.runs.manifest import Manifest
from ppdbench.runs.points import PointKey
from ppdbench.runs.recording import read_records
from ppdbench.runs.records import TurnRecord
from ppdbench.runs.store import point_line, read_manifest, read_points
from ppdbench.table.inputs import RunInput


def read_runs(folders: Iterable[Path]) -> list[RunInput]:
    """Raises RunError for a folder that holds no finished run."""
    return [_read_run(folder) for folder in folders]


def _read_run(folder: Path) -> RunInput:
    manifest, points = read_manifest(folder), read_points(folder)
    return RunInput(
        name=str(folder),
        digest=_digest(manifest, map(point_line, points)),
        manifest=manifest,
        points=points,
        records=partial(_records, folder),
    )


def _digest(manifest: Manifest, lines: Iterable[bytes]) -> str:
    """Of what was measured and with what; not of the host, the folder or the tool's commit."""
    identity = {k: v for k, v in manifest.document().items() if k not in ("host", "commit")}
    digest = hashlib.sha256(point_line(identity))
    for line in lines:
        digest.update(line)
    return f"sha256:{digest.hexdigest()}"


def _records(folder: Path, key: PointKey) -> list[TurnRecord]:
    return read_records(folder, key.slug)
