"""A micro-benchmark's folder: ``manifest.json``, ``microbench.json``, raw records as Parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppdbench.core.errors import RunError
from ppdbench.core.files import write_whole
from ppdbench.runs.manifest import Manifest
from ppdbench.runs.recording import records_as_parquet
from ppdbench.runs.records import TurnRecord
from ppdbench.runs.store import MANIFEST, RunWriter

DOCUMENT = "microbench.json"
SCHEMA_VERSION = 1


def refuse_existing(folder: Path) -> None:
    """Before the run rather than after it.

    Raises:
        RunError: the folder already holds a run.
    """
    if (folder / MANIFEST).exists():
        raise RunError(f"{folder} already holds a run; choose another folder with -o")


def write_result(
    folder: Path, manifest: Manifest, document: Mapping[str, Any], records: Sequence[TurnRecord]
) -> None:
    """Write all of it, each file whole.

    Raises:
        RunError: the folder already holds a run.
    """
    with RunWriter(folder, manifest):
        for kind, content in records_as_parquet(records).items():
            (folder / kind).mkdir(exist_ok=True)
            write_whole(folder / kind / f"{document['protocol']}.parquet", content)
        text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
        write_whole(folder / DOCUMENT, text.encode() + b"\n")


def read_result(folder: Path) -> dict[str, Any]:
    """The document of a folder that :func:`write_result` wrote.

    Raises:
        RunError: there is none, it is damaged, or of another schema version.
    """
    path = folder / DOCUMENT
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} has no {DOCUMENT}; give a folder that ppd microbench wrote with -o"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); run ppd microbench again") from error
    if not isinstance(document, dict) or document.get("kind") != "microbench":
        raise RunError(f"{path} is no result of ppd microbench; run it again with -o")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise RunError(
            f"{path}: schema version {document.get('schema_version')!r}, this ppd reads "
            f"{SCHEMA_VERSION}; run ppd microbench again"
        )
    return document
