"""Points of a run, grouped into the lines that a figure draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ppdbench.core.topology import Role, Topology
from ppdbench.runs.validity import MIN_SUCCESS, NEVER_VOTES

Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class SeriesKey:
    """A line: one topology under one policy."""

    topology: str
    policy: str

    @property
    def label(self) -> str:
        return self.topology if self.policy == "roles" else f"{self.topology} {self.policy}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean over repeats, with the lowest and the highest of them."""

    mean: float
    low: float
    high: float


def route_class(key: SeriesKey) -> str:
    """replica, remote, local, mixed, hybrid, pull, table or other: what the line stands for."""
    topology = Topology.parse(key.topology)
    if not topology.prefill_nodes:
        return "replica"
    if topology.count(Role.R):
        return "hybrid"
    if key.policy == "roles":
        return _by_roles(topology)
    kind = key.policy.partition(":")[0]
    if kind == "share":
        return "mixed"
    return kind if kind in {"remote", "local", "pull", "table"} else "other"


def _by_roles(topology: Topology) -> str:
    if not topology.count(Role.PD):
        return "remote"
    return "mixed" if topology.count(Role.D) else "local"


_ORDER = ("replica", "remote", "pull", "mixed", "table", "other", "hybrid", "local")


def series_of(points: Iterable[Point]) -> list[SeriesKey]:
    """Every line of a run, baselines first."""
    keys = {SeriesKey(str(p["topology"]), str(p["policy"])) for p in points}
    return sorted(keys, key=lambda key: (_ORDER.index(route_class(key)), key))


def workloads_of(points: Iterable[Point]) -> list[str]:
    """In the order of first appearance, which is the grid's."""
    return list(dict.fromkeys(str(point["workload"]) for point in points))


def rates_of(points: Iterable[Point]) -> list[float]:
    return sorted({float(point["rate_per_s"]) for point in points})


def usable(point: Point) -> bool:
    """May be drawn as a value: no final validity code, and enough turns succeeded."""
    success = point.get("success")
    bad = NEVER_VOTES & set(point.get("validity") or ())
    return not bad and success is not None and success >= MIN_SUCCESS


def value(point: Point, turns: str, metric: str, statistic: str) -> float | None:
    """A figure of a point in seconds, ``None`` where the source does not know it."""
    stats = (point.get(turns) or {}).get(metric) or {}
    found = stats.get(statistic)
    return None if found is None else float(found)


def curve(points: Iterable[Point], metric: str, statistic: str) -> dict[float, Spread]:
    """Rate → spread over repeats of a Turn 2+ metric, from usable points only."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for point in points:
        found = value(point, "turn2plus", metric, statistic)
        if found is not None and usable(point):
            by_rate[float(point["rate_per_s"])].append(found)
    return {
        rate: Spread(fmean(values), min(values), max(values))
        for rate, values in sorted(by_rate.items())
    }


def select(points: Iterable[Point], key: SeriesKey, workload: str) -> list[Point]:
    wanted = (key.topology, key.policy, workload)
    return [p for p in points if (p["topology"], p["policy"], p["workload"]) == wanted]
