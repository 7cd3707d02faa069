"""Every point of a grid, each once, on whatever backend; a killed sweep continues."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ppdbench.core.errors import WorkloadError
from ppdbench.experiments.backends import Backend
from ppdbench.experiments.measuring import Measured
from ppdbench.experiments.stopping import StopRule
from ppdbench.runs.manifest import Manifest
from ppdbench.runs.points import PointKey
from ppdbench.runs.store import RunWriter, read_points
from ppdbench.runs.validity import Validity

WRITING_THREADS = 4
WRITES_BEHIND = 64
DEFAULT_VOTERS = frozenset({Validity.TOO_FEW})
"""Codes with which a point still votes under ``build-table``'s defaults (``--min-n 1``)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """After each point: how far the sweep is. ``done`` counts points of earlier attempts too."""

    done: int
    total: int
    measured: Measured


@dataclass(frozen=True, slots=True)
class Effort:
    """What this attempt took. ``events`` are the simulator's; 0 on a live backend."""

    points: int
    turns: int
    events: int
    wall_s: float

    def document(self) -> dict[str, Any]:
        return {
            "measured_points": self.points,
            "measured_turns": self.turns,
            "events": self.events,
            "wall_s": round(self.wall_s, 3),
        }


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep came to.

    ``ok`` points may vote in a table built with the default options: a point that is only
    ``too_few`` may. ``by_validity`` counts points by code; a point may have several.
    """

    run: Path
    points: int
    ok: int
    by_validity: Mapping[str, int]
    effort: Effort

    def document(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "points": self.points,
            "ok": self.ok,
            "by_validity": dict(self.by_validity),
            **self.effort.document(),
        }


def manifest_for(backend: Backend, stop_width: float | None = None) -> Manifest:
    grid = backend.measuring.grid
    workloads = sorted({key.workload for key in grid.points()})
    return Manifest(
        engine=backend.identity(),
        grid=grid.name,
        seed=backend.measuring.seed,
        stop_width=stop_width,
        goodput_limits=asdict(backend.measuring.limits),
        grid_digest=grid.digest,
        workload_digests={name: grid.workload_digest(name) for name in workloads},
    )


def sweep(
    backend: Backend,
    folder: Path,
    *,
    resume: bool = False,
    stop_width: float | None = None,
    report: Callable[[Progress], None] = lambda _: None,
) -> SweepResult:
    """Measure what is missing in ``folder`` and assemble ``points.jsonl``.

    ``stop_width`` makes the grid's repeats the most there can be (:class:`StopRule`).

    Raises:
        RunError: the folder exists and ``resume`` is false, is locked, or holds another run.
        WorkloadError: two points of the grid have one name.
        EngineError: the machine gave up; what was finished stays and can be resumed.
    """
    keys = _distinct(backend.measuring.grid.points())
    backend.measuring.grid.prepare()
    with RunWriter(folder, manifest_for(backend, stop_width), resume=resume) as writer:
        rule = None if stop_width is None else StopRule(stop_width)
        there = writer.finished()
        missing = [key for key in keys if key.slug not in there]
        if rule is not None:
            for key in keys:
                if key.slug in there:
                    rule.saw(key, writer.point(key.slug))
        try:
            effort = _measure(backend, missing, writer, report, rule)
        finally:
            recorded = writer.assemble(key.slug for key in keys)
        left_out = len(rule.left_out) if rule else 0
        if recorded + left_out != len(keys):
            lost = len(keys) - recorded - left_out
            raise AssertionError(f"{lost} points of {len(keys)} were never measured")
    return _result(folder, effort)


def _distinct(keys: list[PointKey]) -> list[PointKey]:
    twice = [slug for slug, count in Counter(key.slug for key in keys).items() if count > 1]
    if twice:
        raise WorkloadError(f"the grid names the point {twice[0]} twice; name each point once")
    return keys


def _measure(
    backend: Backend,
    missing: list[PointKey],
    writer: RunWriter,
    report: Callable[[Progress], None],
    rule: StopRule | None,
) -> Effort:
    began_s = time.monotonic()
    total = len(backend.measuring.grid.points())
    already, points, turns, events = total - len(missing), 0, 0, 0
    wants = rule.wants if rule else None
    # Closed at once when anything fails here, so that workers and nodes do not linger.
    with WriteBehind(writer) as store, closing(backend.measure(missing, wants)) as stream:
        for measured in stream:
            store.put(measured)
            if rule is not None:
                rule.saw(measured.key, json.loads(measured.line))
            points += 1
            turns += measured.turns
            events += measured.timing.get("events", 0)
            left_out = len(rule.left_out) if rule else 0
            report(Progress(already + points, total - left_out, measured))
    return Effort(points, turns, events, time.monotonic() - began_s)


def _result(folder: Path, effort: Effort) -> SweepResult:
    validities = [point["validity"] for point in read_points(folder)]
    return SweepResult(
        run=folder,
        points=len(validities),
        ok=sum(DEFAULT_VOTERS.issuperset(codes) for codes in validities),
        by_validity=dict(sorted(Counter(_flat(validities)).items())),
        effort=effort,
    )


def _flat(lists: Iterable[Iterable[str]]) -> Iterable[str]:
    return (code for codes in lists for code in codes)


class WriteBehind:
    """Stores points on threads, so that a slow disk's fsync does not hold the measuring up.

    At most :data:`WRITES_BEHIND` points wait; leaving the context waits for all of them and
    raises what a write raised.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._threads = ThreadPoolExecutor(WRITING_THREADS, thread_name_prefix="store")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown()
        if error is None:
            self._settle(0)

    def put(self, measured: Measured) -> None:
        self._settle(WRITES_BEHIND)
        self._writer.log(measured.timing)
        self._pending.append(
            self._threads.submit(
                self._writer.put, measured.key.slug, measured.line, measured.records
            )
        )

    def _settle(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()
