"""Percentiles of many rows at once, and intervals by resampling whole conversations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUANTILES = (0.5, 0.9, 0.95, 0.99)
QUANTILE_NAMES = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where it plausibly lies. An interval that holds 0 says "not significant"."""

    estimate: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def relative_half_width(self) -> float:
        """Half the width over the size of the estimate; infinite for an estimate of 0."""
        return (self.high - self.low) / 2 / abs(self.estimate) if self.estimate else math.inf


def row_quantiles(rows: Floats, quantiles: Sequence[float] = QUANTILES) -> Floats:
    """Quantiles of each row of a matrix, shape ``(rows, quantiles)``; NaN entries do not count.

    Linear interpolation, as in ``numpy.quantile``. An infinite entry counts as longer than
    everything; a quantile that touches one is infinite. A row without entries gives NaN.
    """
    if rows.shape[1] == 0:
        return np.full((len(rows), len(quantiles)), np.nan)
    ordered = np.sort(rows, axis=1)  # NaN goes last
    last = np.maximum(np.count_nonzero(~np.isnan(ordered), axis=1) - 1, 0)[:, None]
    position = last * np.asarray(quantiles)
    below = position.astype(np.intp)
    above = np.minimum(below + 1, last)
    low = np.take_along_axis(ordered, below, axis=1)
    high = np.take_along_axis(ordered, above, axis=1)
    share = position - below
    with np.errstate(invalid="ignore"):  # inf − inf and 0 × inf are settled by the next line
        between = low + share * (high - low)
    return np.where((share == 0) | (low == high), low, np.where(np.isinf(high), np.inf, between))


def row_means(rows: Floats) -> Floats:
    """Mean of each row without its NaN entries; NaN for a row without entries."""
    known = ~np.isnan(rows)
    counts = np.count_nonzero(known, axis=1)
    sums = np.sum(rows, axis=1, where=known)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t interval of a mean over repeats; infinitely wide for a single value."""
    from scipy import stats

    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if len(sample) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf((1 + confidence) / 2, len(sample) - 1) * stats.sem(sample))
    return Interval(mean, mean - half, mean + half)


def bootstrap(
    blocks: Sequence[Floats],
    statistic: Callable[..., Floats],
    *,
    seed: int,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap that draws whole blocks, the same ones for every column.

    ``blocks`` are columns with one entry per block (a conversation, a repeat): sums, counts.
    ``statistic(*columns, axis=-1)`` must accept an axis. With fewer than two blocks, the interval
    is infinitely wide.
    """
    from scipy import stats

    columns = [np.asarray(column, dtype=np.float64) for column in blocks]
    estimate = float(statistic(*columns, axis=-1))
    if len(columns[0]) < 2:
        return Interval(estimate, -math.inf, math.inf)
    result = stats.bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(estimate, float(low), float(high))


Figures = Mapping[str, Sequence[float]]
"""By conversation, its turns' figures."""


def paired_columns(first: Figures, second: Figures) -> list[Floats]:
    """Sums and counts of both sides, by conversation, over those that stand in both.

    Raises:
        ValueError: no conversation stands in both.
    """
    shared = sorted(key for key in first.keys() & second.keys() if first[key] and second[key])
    if not shared:
        raise ValueError("no conversation stands on both sides, so nothing can be compared")
    return [
        np.array([reduce(side[key]) for key in shared], dtype=np.float64)
        for side in (first, second)
        for reduce in (math.fsum, len)
    ]


def relative_change(
    sum_a: Floats, count_a: Floats, sum_b: Floats, count_b: Floats, axis: int = -1
) -> Floats:
    """Second mean over first mean, − 1, of :func:`paired_columns`."""
    first = sum_a.sum(axis) / count_a.sum(axis)
    change: Floats = sum_b.sum(axis) / count_b.sum(axis) / first - 1
    return change
