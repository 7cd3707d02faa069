"""What no prediction of one unseeded run can do better than: arrivals by chance.

Every point of the authors' sweep is one run of ten seconds whose arrivals nobody recorded. The
simulator says what that alone does, because one of its seeds can stand for the real run: the other
seeds predict it with the very model that made it. Turn 1 of two twins (D and pD serve it alike)
says what the real cluster adds to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np

from ppdbench.experiments.fidelity import Medians

REAL_DIFFERENCE = 0.05
"""Below it two routes count as equal."""


class Simulated(Protocol):
    """A point with what was measured, and with the figures of each seed."""

    @property
    def runs(self) -> Sequence[Medians]: ...
    @property
    def measured(self) -> Medians: ...
    @property
    def predicted(self) -> Medians: ...
    def without(self, seed: int) -> Medians: ...


Twins = Sequence[tuple[Simulated, Simulated]]
Key = tuple[str, str]


def error_floor(points: Iterable[Simulated], key: Key) -> dict[str, float] | None:
    """Median and p90 error of the simulator against one more run of itself."""
    errors = [
        abs(point.without(seed)[key] / run[key] - 1)
        for point in points
        for seed, run in enumerate(point.runs)
        if len(point.runs) > 1
    ]
    if not errors:
        return None
    median, p90 = np.percentile(errors, (50, 90))
    return {"median": round(float(median), 4), "p90": round(float(p90), 4)}


def self_agreement(twins: Twins, key: Key) -> dict[str, Any]:
    """How often the simulator names the winner of one more run of itself."""
    same = of = 0
    for remote, local in twins:
        for seed in range(min(len(remote.runs), len(local.runs))):
            there = local.runs[seed][key] / remote.runs[seed][key] - 1
            if abs(there) <= REAL_DIFFERENCE or len(remote.runs) < 2:
                continue
            here = local.without(seed)[key] - remote.without(seed)[key]
            same += (there < 0) == (here < 0)
            of += 1
    return {"same": same, "of": of, "share": round(same / of, 4) if of else None}


def agreement_under_turn1_noise(twins: Twins, key: Key) -> float | None:
    """The share of winners that a predictor would name if its figures were the truth.

    The truth plus the log ratio of some pair's real Turn 1 is what is measured; Turn 1 counts
    replies of up to 1,024 tokens, so the noise of a short Turn 2 is larger than this.
    """
    noise = [np.log(ratio) for ratio in _turn1_ratios(twins, key[1])]
    truth = [np.log(local.predicted[key] / remote.predicted[key]) for remote, local in twins]
    seen = [(true, true + error) for true, error in product(truth, noise)]
    counted = [(true < 0) == (m < 0) for true, m in seen if abs(np.expm1(m)) > REAL_DIFFERENCE]
    return round(float(np.mean(counted)), 4) if counted else None


def turn1_differences(twins: Twins, metric: str) -> dict[str, Any]:
    """How many twins differ by more than 5 % in Turn 1, really and between two seeds."""
    key = "turn1", metric
    real = _turn1_ratios(twins, metric)
    simulated = [
        local.runs[-1][key] / remote.runs[0][key] for remote, local in twins if len(local.runs) > 1
    ]
    return {"pairs": len(real), "real": _differ(real), "simulated": _differ(simulated)}


def _turn1_ratios(twins: Twins, metric: str) -> list[float]:
    key = "turn1", metric
    return [local.measured[key] / remote.measured[key] for remote, local in twins]


def _differ(ratios: Iterable[float]) -> int:
    return sum(abs(ratio - 1) > REAL_DIFFERENCE for ratio in ratios)
