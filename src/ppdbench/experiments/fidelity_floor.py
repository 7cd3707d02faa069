"""What no prediction of one unseeded run can do better than: arrivals by chance.

Every point of the authors' sweep is one run of ten seconds whose arrivals nobody recorded. The
simulator says what that alone does, because one of its seeds can stand for the real run: the other
seeds predict it with the very model that made it. Turn 1 of two twins says what the real cluster
adds to that: what the model expects of their difference (where later turns stay on D, P has more
time for first ones), taken away, leaves chance and the model's own error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np

from ppdbench.experiments.fidelity import Medians

REAL_DIFFERENCE = 0.05
"""Below it two routes count as equal."""


class Simulated(Protocol):
    """A point with what was measured, and with the figures of each seed."""

    @property
    def point(self) -> Mapping[str, Any]: ...
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
    """How often the simulator names the winner of one more run of itself.

    That run's two sides have different seeds: on the real cluster twins did not share arrivals
    either, and one seed draws the same ones for both.
    """
    same = of = 0
    for remote, local in twins:
        for seed, other in _unlike_seeds(remote, local):
            there = local.runs[other][key] / remote.runs[seed][key] - 1
            if abs(there) <= REAL_DIFFERENCE:
                continue
            here = local.without(other)[key] - remote.without(seed)[key]
            same += (there < 0) == (here < 0)
            of += 1
    return {"same": same, "of": of, "share": round(same / of, 4) if of else None}


def _unlike_seeds(remote: Simulated, local: Simulated) -> Iterable[tuple[int, int]]:
    seeds = min(len(remote.runs), len(local.runs))
    return [(seed, (seed + 1) % seeds) for seed in range(seeds)] if seeds > 1 else []


def agreement_under_turn1_noise(twins: Twins, key: Key) -> float | None:
    """The share of winners that a predictor would name if its figures were the truth.

    Measured is then the truth of one pair times the unexplained ratio of Turn 1 of any pair at its
    rate. Turn 1 counts replies of up to 1,024 tokens, so the noise of a short Turn 2 is larger;
    and the model's own error on Turn 1 counts as noise.
    """
    counted = []
    for (remote, local), noisy in product(twins, twins):
        if remote.point["rate_per_s"] != noisy[0].point["rate_per_s"]:
            continue
        true = local.predicted[key] / remote.predicted[key]
        seen = true * _unexplained(*noisy, ("turn1", key[1]))
        if abs(seen - 1) > REAL_DIFFERENCE:
            counted.append((true < 1) == (seen < 1))
    return round(float(np.mean(counted)), 4) if counted else None


def turn1_differences(twins: Twins, metric: str) -> dict[str, Any]:
    """How many twins differ by more than 5 % in Turn 1.

    ``real`` as measured, ``expected`` by the mean of the seeds; ``unexplained`` as measured beyond
    what is expected, and ``unexplained_between_seeds`` in one more run of the simulator (``None``
    where each point has one seed).
    """
    key = "turn1", metric
    between_seeds = [
        local.runs[-1][key] / remote.runs[0][key]
        / (local.without(len(local.runs) - 1)[key] / remote.without(0)[key])
        for remote, local in twins
        if min(len(local.runs), len(remote.runs)) > 1
    ]  # fmt: skip
    return {
        "pairs": len(twins),
        "real": _differ(local.measured[key] / remote.measured[key] for remote, local in twins),
        "expected": _differ(
            local.predicted[key] / remote.predicted[key] for remote, local in twins
        ),
        "unexplained": _differ(_unexplained(*pair, key) for pair in twins),
        "unexplained_between_seeds": _differ(between_seeds) if between_seeds else None,
    }


def _unexplained(remote: Simulated, local: Simulated, key: Key) -> float:
    """The ratio of two twins as measured, in units of the ratio that is expected."""
    real = local.measured[key] / remote.measured[key]
    return real * remote.predicted[key] / local.predicted[key]


def _differ(ratios: Iterable[float]) -> int:
    return sum(abs(ratio - 1) > REAL_DIFFERENCE for ratio in ratios)
