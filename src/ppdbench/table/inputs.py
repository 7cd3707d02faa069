"""What a table is built from: runs, checked to be poolable, and their points by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppdbench.core.errors import TableError, UsageError
from ppdbench.core.topology import Role, Topology
from ppdbench.runs.points import PointKey
from ppdbench.runs.validity import NEVER_VOTES
from ppdbench.table.schema import CHECKED_FIELDS, SIMULATED

Point = Mapping[str, Any]
"""One line of ``points.jsonl``."""
Place = tuple[str, float]
"""A workload and a rate."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """A run as the builder sees it. ``records`` gives a point's per-turn frame or ``None``."""

    name: str
    digest: str
    manifest: Mapping[str, Any]
    points: Sequence[Point]
    records: Callable[[PointKey], Any]

    @property
    def backend(self) -> str:
        return str(self.manifest.get("backend"))

    @property
    def simulated(self) -> bool:
        return self.backend == SIMULATED

    def workload_digest(self, workload: str) -> str | None:
        digests = self.manifest.get("workload_digests") or {}
        return digests.get(workload)


def key_of(point: Point) -> PointKey:
    return PointKey(
        point["topology"],
        point["policy"],
        point["workload"],
        float(point["rate_per_s"]),
        int(point["repeat"]),
    )


def check_poolable(runs: Sequence[RunInput]) -> None:
    """Refuse runs that differ in what must agree, naming the field.

    A simulated and a live run may differ in what only one of them has: the backend, the engine
    and its version, the connector.

    Raises:
        TableError: a run given twice, or a field that differs.
    """
    for index, run in enumerate(runs):
        for other in runs[:index]:
            if other.digest == run.digest:
                raise TableError(
                    f"run {run.name} has the same points as {other.name}; give it once"
                )
            _check_pair(other, run)


def _check_pair(one: RunInput, other: RunInput) -> None:
    for name in _fields_to_check(one, other):
        before, after = one.manifest.get(name), other.manifest.get(name)
        if before != after:
            raise _differs(one, other, name, before, after)
    workloads = {p["workload"] for p in one.points} & {p["workload"] for p in other.points}
    for workload in sorted(workloads):
        before, after = one.workload_digest(workload), other.workload_digest(workload)
        if before != after:
            raise _differs(one, other, f"workload digest of {workload}", before, after)


def _fields_to_check(one: RunInput, other: RunInput) -> tuple[str, ...]:
    if one.simulated == other.simulated:
        return CHECKED_FIELDS
    return tuple(f for f in CHECKED_FIELDS if f not in ("engine", "engine_version", "connector"))


def _differs(
    one: RunInput, other: RunInput, name: str, before: object, after: object
) -> TableError:
    return TableError(
        f"runs {one.name} and {other.name} differ in {name}: {before!r} and {after!r}; "
        "runs that differ in it may not be pooled; build a table from each"
    )


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
