"""What a table is built from: runs, checked to be poolable, and their points by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppdbench.core.errors import TableError, UsageError
from ppdbench.core.topology import Role, Topology
from ppdbench.runs.manifest import SIMULATED, Manifest, refuse_to_pool
from ppdbench.runs.points import PointKey
from ppdbench.runs.records import TurnRecord
from ppdbench.runs.validity import NEVER_VOTES

Point = Mapping[str, Any]
"""One line of ``points.jsonl``."""
Place = tuple[str, float]
"""A workload and a rate."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """A run as the builder sees it. ``records`` gives a point's turns, none where none are kept."""

    name: str
    digest: str
    manifest: Manifest
    points: Sequence[Point]
    records: Callable[[PointKey], Sequence[TurnRecord]]

    @property
    def backend(self) -> str:
        return self.manifest.engine.backend

    @property
    def simulated(self) -> bool:
        return self.backend == SIMULATED


def key_of(point: Point) -> PointKey:
    return PointKey(
        point["topology"],
        point["policy"],
        point["workload"],
        float(point["rate_per_s"]),
        int(point["repeat"]),
    )


def check_poolable(runs: Sequence[RunInput]) -> None:
    """Refuse runs that measured different things, naming the field.

    Raises:
        TableError: a run given twice.
        RunError: a field that differs.
    """
    by_digest: dict[str, str] = {}
    for run in runs:
        if run.digest in by_digest:
            first = by_digest[run.digest]
            raise TableError(f"run {run.name} holds the same points as {first}; give it once")
        by_digest[run.digest] = run.name
    mixed = len({run.simulated for run in runs}) > 1
    refuse_to_pool({run.name: run.manifest for run in runs}, across_backends=mixed)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which points are the remote side and which the local side of a comparison, best first."""

    base: str
    remote: tuple[tuple[str, str], ...]
    local: tuple[tuple[str, str], ...]
    replica: str

    @classmethod
    def of(cls, base: Topology) -> Pairing:
        """``roles`` counts as remote where no node is a pD, and as local on the twin."""
        if not base.prefill_nodes:
            raise UsageError(
                f"--base {base}: a comparison needs P and D, as in 2P_2D; "
                "replicas enter the table beside it on their own"
            )
        name, twin = str(base), str(base.twin())
        plain = ((name, "roles"),) if not base.count(Role.PD) else ()
        return cls(
            name,
            remote=((name, "remote"), *plain),
            local=((name, "local"), (twin, "roles"), (twin, "local")),
            replica=f"{len(base.nodes)}R",
        )


@dataclass(frozen=True, slots=True)
class SidePoint:
    """A point and the run it comes from."""

    run: RunInput
    point: Point


def votes(point: Point) -> bool:
    return not NEVER_VOTES.intersection(point["validity"])


def barred(runs: Sequence[RunInput], sides: Sequence[tuple[str, str]]) -> Counter[str]:
    """Points of these sides that may never vote, by code."""
    return Counter(
        str(code)
        for run in runs
        for point in run.points
        if (point["topology"], point["policy"]) in sides
        for code in NEVER_VOTES.intersection(point["validity"])
    )


def points_at(
    runs: Sequence[RunInput], sides: Sequence[tuple[str, str]]
) -> dict[Place, list[SidePoint]]:
    """Voting points per place; the first of ``sides`` that has any at a place fills it."""
    found: dict[Place, dict[tuple[str, str], list[SidePoint]]] = {}
    for run in runs:
        for point in filter(votes, run.points):
            side = (point["topology"], point["policy"])
            if side in sides:
                place = (point["workload"], float(point["rate_per_s"]))
                found.setdefault(place, {}).setdefault(side, []).append(SidePoint(run, point))
    return {
        place: next(by_side[side] for side in sides if side in by_side)
        for place, by_side in found.items()
    }
