"""What differs between two runs, or two routes of one run, and whether it is more than noise.

Pure: points and records in, rows out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppdbench.core.seeds import seed_for
from ppdbench.core.statistics import Floats, Interval, bootstrap, paired_columns, relative_change
from ppdbench.runs.records import TurnRecord
from ppdbench.runs.validity import NEVER_VOTES

METRICS = ("ttft_s", "tpot_s", "e2e_s")

Point = Mapping[str, Any]
Records = Callable[[Point], Sequence[TurnRecord]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric over later turns on both sides. ``change`` is relative, second over first − 1.

    ``points`` are the pairs that both sides measured well. With fewer than two of them and no
    records, nothing is known of the spread and ``interval`` is ``None``.
    """

    group: str
    metric: str
    points: int
    first_s: float
    second_s: float
    interval: Interval | None

    @property
    def change(self) -> float:
        return self.second_s / self.first_s - 1

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``not significant``, or ``unknown`` without an interval."""
        if self.interval is None:
            return "unknown"
        if not self.interval.significant:
            return "not significant"
        return "faster" if self.interval.high < 0 else "slower"

    def document(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "group": self.group,
            "metric": self.metric,
            "points": self.points,
            "first_s": self.first_s,
            "second_s": self.second_s,
            "change": self.change,
            "change_ci": None if interval is None else [interval.low, interval.high],
            "verdict": self.verdict,
        }


def may_vote(point: Point) -> bool:
    return not NEVER_VOTES.intersection(point["validity"])


def compare_runs(first: Sequence[Point], second: Sequence[Point]) -> list[Difference]:
    """Equal points of two runs, by topology and policy."""
    theirs = {_place(point, "topology", "policy"): point for point in second}
    pairs = [
        (point, theirs[place])
        for point in first
        if (place := _place(point, "topology", "policy")) in theirs
    ]
    return _differences(pairs, lambda point: f"{point['topology']} {point['policy']}")


def compare_policies(
    points: Sequence[Point], first: str, second: str, records: Records | None = None
) -> list[Difference]:
    """Two policies on equal conversations, by topology and workload; by turns where kept."""
    theirs = {_place(p, "topology"): p for p in points if p["policy"] == second}
    pairs = [
        (point, theirs[place])
        for point in points
        if point["policy"] == first and (place := _place(point, "topology")) in theirs
    ]
    return _differences(pairs, lambda point: f"{point['topology']} {point['workload']}", records)


def _place(point: Point, *names: str) -> tuple[Any, ...]:
    return tuple(point[name] for name in (*names, "workload", "rate_per_s", "repeat"))


def _differences(
    pairs: Sequence[tuple[Point, Point]],
    group_of: Callable[[Point], str],
    records: Records | None = None,
) -> list[Difference]:
    groups: dict[str, list[tuple[Point, Point]]] = {}
    for pair in pairs:
        if all(map(may_vote, pair)):
            groups.setdefault(group_of(pair[0]), []).append(pair)
    return [
        difference
        for group, members in groups.items()
        for metric in METRICS
        if (difference := _difference(group, metric, members, records)) is not None
    ]


def _difference(
    group: str, metric: str, pairs: Sequence[tuple[Point, Point]], records: Records | None
) -> Difference | None:
    means = [(_mean(a, metric), _mean(b, metric)) for a, b in pairs]
    known = [(a, b) for a, b in means if a and b]
    if not known:
        return None
    columns = (_turns(metric, pairs, records) if records else None) or _points(known)
    first, second = (
        float(sums.sum() / counts.sum()) for sums, counts in (columns[:2], columns[2:])
    )
    interval = None
    if len(columns[0]) > 1:
        interval = bootstrap(columns, relative_change, seed=seed_for(0, group, metric))
    return Difference(group, metric, len(known), first, second, interval)


def _mean(point: Point, metric: str) -> float | None:
    value: float | None = point["turn2plus"][metric]["mean"]
    return value


def _points(pairs: Sequence[tuple[float, float]]) -> list[Floats]:
    """Points are drawn in pairs, which takes the differences between workloads and rates out."""
    sides = zip(*pairs, strict=True)
    return [column for side in sides for column in (np.array(side), np.ones(len(side)))]


def _turns(
    metric: str, pairs: Sequence[tuple[Point, Point]], records: Records
) -> list[Floats] | None:
    """Conversations are drawn, those that both sides served; ``None`` where no turn was kept."""
    sides: tuple[dict[str, list[float]], ...] = ({}, {})
    for pair in pairs:
        for side, point in zip(sides, pair, strict=True):
            side.update(_by_conversation(metric, point, records(point)))
    if not sides[0].keys() & sides[1].keys():
        return None
    return paired_columns(*sides)


def _by_conversation(
    metric: str, point: Point, records: Sequence[TurnRecord]
) -> dict[str, list[float]]:
    """Later turns' figures by conversation, named with the point so that repeats stay apart."""
    figures: dict[str, list[float]] = {}
    for record in records:
        value = getattr(record, metric) if record.turn > 1 else None
        if value is not None:
            name = f"{point['topology']}/{point['workload']}/{point['rate_per_s']:g}"
            figures.setdefault(f"{name}/{point['repeat']}/{record.conversation}", []).append(value)
    return figures
