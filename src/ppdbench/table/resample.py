"""Bootstrap replicates of the parts of S: whole conversations are drawn, within whole repeats.

Both sides of a comparison are drawn together, because they replay the same conversations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ppdbench.table.paired import Floats, Turns
from ppdbench.table.score import REPLICATE_UNIT, Slo

RESAMPLES = 400
"""Kept in the table, so that other weights give intervals without the runs."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

Counts = NDArray[np.int64]
Replicates = dict[str, list[int]]


def of_turns(turns: Turns, stat: str, slo: Slo | None, seed: int) -> Replicates | None:
    """From paired turns that succeeded on both sides; ``None`` with fewer than two conversations.

    Under ``slo`` every turn sent counts, failed ones as missing the limits.
    """
    paired = turns.take(np.asarray(turns.ok.all(axis=1)))
    if len(np.unique(paired.unit)) < 2:
        return None
    draws = _draw(paired.group, paired.unit, np.random.default_rng(seed))
    replicates = _deltas(
        _estimates(paired.ttft_s, draws, stat), _estimates(paired.tpot_s, draws, stat)
    )
    if slo is not None:
        draws = _draw(turns.group, turns.unit, np.random.default_rng(seed))
        shares = _means(meets(turns, slo).astype(np.float64), draws)
        replicates["d_slo"] = _whole(shares[1] - shares[0])
    return replicates


def of_repeats(ttft_s: Floats, tpot_s: Floats, weights: Floats, seed: int) -> Replicates | None:
    """From one figure per repeat and side, each as heavy as its turns; needs two repeats."""
    repeats = len(weights)
    if repeats < 2:
        return None
    drawn = np.random.default_rng(seed).multinomial(
        repeats, np.full(repeats, 1 / repeats), size=RESAMPLES
    )
    return _deltas(*(_means(figures, drawn * weights) for figures in (ttft_s, tpot_s)))


def meets(turns: Turns, slo: Slo) -> NDArray[np.bool_]:
    """Rows by sides: both limits kept. A reply of one token has no TPOT to miss."""
    with np.errstate(invalid="ignore"):
        late = turns.tpot_s > slo.tpot_s
        return np.asarray((turns.ttft_s <= slo.ttft_s) & ~late)


def _draw(group: NDArray[np.intp], unit: NDArray[np.intp], rng: np.random.Generator) -> Counts:
    """How often each turn is drawn, resamples by turns: repeats first, then conversations."""
    drawn = np.zeros((RESAMPLES, int(unit.max()) + 1), dtype=np.int64)
    groups = np.unique(group)
    times = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=RESAMPLES)
    for column, number in enumerate(groups):
        units = np.unique(unit[group == number])
        share = np.full(len(units), 1 / len(units))
        drawn[:, units] = rng.multinomial(times[:, column] * len(units), share)
    return drawn[:, unit]


def _estimates(figures: Floats, draws: Counts, stat: str) -> Floats:
    """Sides by resamples."""
    if stat == "mean":
        return _means(figures, draws)
    return np.stack([_quantile(column, draws, QUANTILES[stat]) for column in figures.T])


def _means(figures: Floats, draws: Counts | Floats) -> Floats:
    known = ~np.isnan(figures)
    total = draws @ known
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((draws @ np.where(known, figures, 0.0) / total).T)


def _quantile(values: Floats, draws: Counts, share: float) -> Floats:
    """Weighted quantile of one column per resample: the first value that reaches the share."""
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    reached = np.cumsum(draws[:, order], axis=1)
    place = (reached < share * reached[:, -1:]).sum(axis=1)
    return np.asarray(values[order][np.minimum(place, len(order) - 1)])


def _deltas(ttft_s: Floats, tpot_s: Floats) -> Replicates:
    return {
        "d_ttft": _whole(_relative(ttft_s[0] - ttft_s[1], ttft_s[0])),
        "d_tpot": _whole(_relative(tpot_s[1] - tpot_s[0], tpot_s[0])),
    }


def _relative(difference: Floats, before: Floats) -> Floats:
    """0 where the denominator is not positive or unknown, as in the score."""
    usable = (before > 0) & ~np.isnan(difference)
    return np.divide(difference, before, out=np.zeros_like(before), where=usable)


def _whole(values: Floats) -> list[int]:
    rounded: list[int] = np.rint(values / REPLICATE_UNIT).astype(np.int64).tolist()
    return rounded
