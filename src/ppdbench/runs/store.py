"""A run folder: one writer, whole files only, and the same bytes for the same run.

::

    manifest.json      what the run was made with
    points/SLUG.json   one finished point each; a point exists when its file does
    points.jsonl       all of them in grid order, sorted keys; no clock, host, path or pid
    timing.jsonl       those: one line per attempt
    records/SLUG.parquet, warm_up/SLUG.parquet   per-turn records where they are kept
    lock               held by the writing process; gone when it dies
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from ppdbench.core.errors import RunError
from ppdbench.core.files import TEMPORARY, write_whole
from ppdbench.runs.manifest import Manifest, refuse_other_run

MANIFEST, POINTS, TIMING = "manifest.json", "points.jsonl", "timing.jsonl"
WITHOUT_A_POINT = frozenset(
    {MANIFEST, POINTS, TIMING, "points", "records", "warm_up", "lock", "logs"}
)
"""All that an attempt may leave that ended before its first point."""


def point_line(document: Mapping[str, Any]) -> bytes:
    """One line of ``points.jsonl``: equal documents are equal bytes."""
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


class RunWriter:
    """The one process that writes a run folder. Use it as a context manager.

    Raises:
        RunError: the folder holds another run, is locked, or exists and ``resume`` is false.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, resume: bool = False) -> None:
        self.folder = folder
        self._manifest = manifest
        self._resume = resume
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self._refuse_existing()
        _make_folder(self.folder)
        self._lock = _lock(self.folder)
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _refuse_existing(self) -> None:
        """An attempt that ended before its first point left nothing to lose or to mix with."""
        if not self._resume and (self.folder / MANIFEST).exists() and self._holds_results():
            raise RunError(
                f"{self.folder} already holds a run; continue it with --resume, "
                "or choose another folder with -o"
            )

    def _open(self) -> None:
        path = self.folder / MANIFEST
        if path.exists() and (self._resume or self._holds_results()):
            refuse_other_run(self.folder, read_manifest(self.folder), self._manifest)
            self._refuse_without_points()
        else:
            write_whole(path, _pretty(self._manifest.document()))
        (self.folder / "points").mkdir(exist_ok=True)
        _drop_leftovers(self.folder)

    def _refuse_without_points(self) -> None:
        """What is assembled anew must not lose what only the assembled file still has."""
        if self._holds_points() and not self.finished():
            raise RunError(
                f"{self.folder} has its {POINTS} and not the folder points/ that a sweep resumes "
                "from; bring that back, or measure again with another -o"
            )

    def _holds_points(self) -> bool:
        points = self.folder / POINTS
        return bool(self.finished()) or (points.exists() and points.stat().st_size > 0)

    def _holds_results(self) -> bool:
        """Points, or files that no sweep wrote: a micro-benchmark has a manifest, too."""
        names = {path.name for path in self.folder.iterdir()}
        return self._holds_points() or not names <= WITHOUT_A_POINT

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finished(self) -> set[str]:
        """Slugs of the points that are there."""
        return {path.stem for path in (self.folder / "points").glob("*.json")}

    def point(self, slug: str) -> dict[str, Any]:
        """A finished point's object."""
        document: dict[str, Any] = json.loads(
            (self.folder / "points" / f"{slug}.json").read_bytes()
        )
        return document

    def put(self, slug: str, line: bytes, records: Mapping[str, bytes] | None = None) -> None:
        """Store a point; its records (folder name → Parquet bytes) first, so that none lack."""
        for kind, content in (records or {}).items():
            (self.folder / kind).mkdir(exist_ok=True)
            write_whole(self.folder / kind / f"{slug}.parquet", content)
        write_whole(self.folder / "points" / f"{slug}.json", line)

    def log(self, timing: Mapping[str, Any]) -> None:
        """Add a line to ``timing.jsonl``."""
        with (self.folder / TIMING).open("ab") as file:
            file.write(point_line(timing))

    def assemble(self, slugs: Iterable[str]) -> int:
        """Write ``points.jsonl`` from the finished points among ``slugs``, in that order."""
        folder, there = self.folder / "points", self.finished()
        lines = [(folder / f"{slug}.json").read_bytes() for slug in slugs if slug in there]
        _sync_folder(folder)
        write_whole(self.folder / POINTS, b"".join(lines))
        return len(lines)

    def write_points(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """``points.jsonl`` at once, for a run that was not measured here."""
        write_whole(self.folder / POINTS, b"".join(map(point_line, documents)))


def read_manifest(folder: Path) -> Manifest:
    """Raises RunError when there is no run or it cannot be read."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(
            f"{folder} holds no run ({MANIFEST} is missing); give a folder that ppd sweep or "
            "ppd import wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); measure the run again") from error
    return Manifest.of(document, str(path))


def read_points(folder: Path) -> list[dict[str, Any]]:
    """The run's points in grid order; raises RunError when it is not finished or damaged."""
    read_manifest(folder)
    path = folder / POINTS
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        raise RunError(
            f"{folder} has no {POINTS}: its sweep was cut short; finish it with --resume"
        ) from None
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); finish it again with --resume") from error


def read_timing(folder: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of ``timing.jsonl``; a line cut by a kill is skipped."""
    with suppress(FileNotFoundError):
        for line in (folder / TIMING).read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _pretty(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False).encode() + b"\n"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the run folder {folder} ({error}); choose another -o"
        ) from error


def _lock(folder: Path) -> int:
    """An exclusive lock that the kernel drops when this process dies, however it dies."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunError(
            f"{folder} is being written by another ppd; wait for it or choose another -o"
        ) from None
    return handle


def _drop_leftovers(folder: Path) -> None:
    """Half-written files, records without their point and half a line of a sweep that was killed.

    A point whose line does not end was cut by a copy or a full disk; it is measured again.
    """
    for path in folder.rglob(f"*{TEMPORARY}"):
        path.unlink()
    for path in (folder / "points").glob("*.json"):
        if not _ends_its_line(path):
            path.unlink()
    points = {path.stem for path in (folder / "points").glob("*.json")}
    for path in folder.glob("*/*.parquet"):
        if path.stem not in points:
            path.unlink()
    timing = folder / TIMING
    if timing.exists() and not (content := timing.read_bytes()).endswith(b"\n"):
        write_whole(timing, content[: content.rfind(b"\n") + 1])


def _ends_its_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(1, path.stat().st_size), os.SEEK_END)
        return file.read() == b"\n"


def _sync_folder(folder: Path) -> None:
    """Make the renames in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
