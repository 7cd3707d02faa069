"""When a place has been repeated often enough. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ppdbench.core.statistics import mean_interval
from ppdbench.runs.points import PointKey
from ppdbench.runs.validity import NEVER_VOTES

METRICS = ("ttft_s", "tpot_s")
LEAST_REPEATS = 3
"""Two values have an interval of six times their spread; three begin to say something."""

Place = tuple[str, str, float]


class StopRule:
    """Repeats go on until the means over later turns are known well enough.

    A repeat is left out once the 95 % intervals of mean TTFT and of mean TPOT, over the repeats
    before it, are within ± ``width`` of the mean, for every policy at that place (topology,
    workload, rate): routes that are compared keep equal repeats. Points that may not vote do not
    count. Only repeats *before* a point decide, so the order in which points finish does not.
    """

    def __init__(self, width: float) -> None:
        self.width = width
        self._seen: dict[Place, dict[str, dict[int, tuple[float, ...]]]] = {}
        self.left_out: set[str] = set()

    def __repr__(self) -> str:
        return f"<StopRule ±{self.width:.1%}, {len(self.left_out)} points left out>"

    def saw(self, key: PointKey, point: Mapping[str, Any]) -> None:
        """Learn a finished point. A policy that has no good point yet keeps its place open."""
        policies = self._seen.setdefault(_place(key), defaultdict(dict))
        means = tuple(point["turn2plus"][metric]["mean"] for metric in METRICS)
        good = not NEVER_VOTES.intersection(point["validity"]) and None not in means
        policies[key.policy].update({key.repeat: means} if good else {})

    def wants(self, key: PointKey) -> bool:
        """Whether this repeat is still to be measured; call it when the ones before are done."""
        policies = self._seen.get(_place(key), {})
        before = [
            [means for repeat, means in repeats.items() if repeat < key.repeat]
            for repeats in policies.values()
        ]
        if not before or any(self._unsure(values) for values in before):
            return True
        self.left_out.add(key.slug)
        return False

    def _unsure(self, values: Sequence[tuple[float, ...]]) -> bool:
        if len(values) < LEAST_REPEATS:
            return True
        widths = [mean_interval(column).relative_half_width for column in zip(*values, strict=True)]
        return max(widths) > self.width


def _place(key: PointKey) -> Place:
    return key.topology, key.workload, key.rate_per_s
