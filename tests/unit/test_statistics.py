"""Percentiles against numpy, intervals against known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ppdbench.core.statistics import (
    QUANTILES,
    bootstrap,
    mean_interval,
    paired_columns,
    relative_change,
    row_means,
    row_quantiles,
)


def paired_change(first, second, seed):
    return bootstrap(paired_columns(first, second), relative_change, seed=seed)


def test_row_quantiles_are_numpys_without_the_unknown():
    """Each row's NaN entries do not count, and the rest is numpy's linear interpolation."""
    rows = np.random.default_rng(0).exponential(size=(6, 41))
    rows[0, 5:] = np.nan
    rows[1, ::3] = np.nan
    rows[2, :] = 7.0

    for row, quantiles in zip(rows, row_quantiles(rows), strict=True):
        assert quantiles == pytest.approx(np.nanquantile(row, QUANTILES), rel=1e-12)


def test_an_infinite_entry_lies_above_everything():
    """A quantile among the finite ones is finite; one that touches the infinite is infinite."""
    rows = np.array([[1.0, 2.0, 3.0, 4.0, math.inf]])

    assert row_quantiles(rows, (0.5, 0.75, 0.9)).tolist() == [[3.0, 4.0, math.inf]]


@pytest.mark.parametrize("rows", [np.empty((2, 0)), np.full((2, 3), np.nan)])
def test_a_row_without_entries_has_no_figures(rows):
    """Nothing measured is NaN, never 0."""
    assert np.isnan(row_means(rows)).all()
    assert np.isnan(row_quantiles(rows)).all()


def test_a_clear_paired_difference_is_significant_and_a_coin_toss_is_not():
    """Pairing sees 0.01 under a spread of 1 between conversations; no effect gives no verdict."""
    rng = np.random.default_rng(1)
    base = {f"c{i}": list(rng.normal(1 + i, 0.01, size=3)) for i in range(60)}
    faster = {key: [value - 0.01 for value in values] for key, values in base.items()}
    noise = {
        key: [value + 0.01 * (-1) ** i for value in values]
        for i, (key, values) in enumerate(base.items())
    }

    gain = paired_change(base, faster, seed=2)
    none = paired_change(base, noise, seed=2)

    assert gain.significant
    assert gain.low <= -0.01 / 30.5 <= gain.high
    assert gain.estimate == pytest.approx(-0.01 / 30.5, rel=1e-3)
    assert not none.significant


def test_turns_of_a_conversation_are_drawn_together():
    """Copies of a turn are no new evidence: block-wise, the interval stays as wide."""
    rng = np.random.default_rng(3)
    first = {f"c{i}": [1.0] for i in range(20)}
    second = {f"c{i}": [float(rng.normal())] for i in range(20)}
    copied_first = {key: values * 50 for key, values in first.items()}
    copied_second = {key: values * 50 for key, values in second.items()}

    once = paired_change(first, second, seed=4)
    copied = paired_change(copied_first, copied_second, seed=4)

    assert copied.high - copied.low == pytest.approx(once.high - once.low)


def test_a_bootstrap_covers_the_truth_as_often_as_it_says():
    """Of 95 % intervals over 40 blocks, some 95 of 100 hold the true mean."""
    rng = np.random.default_rng(5)
    samples = rng.normal(10, 2, size=(100, 40))
    intervals = [
        bootstrap([row], lambda x, axis: x.mean(axis), seed=i, resamples=500)
        for i, row in enumerate(samples)
    ]

    assert 85 <= sum(i.low <= 10 <= i.high for i in intervals) <= 99


def test_sides_that_share_no_conversation_cannot_be_compared():
    """Unpaired figures are refused, not compared."""
    with pytest.raises(ValueError, match="no conversation"):
        paired_columns({"a": [1.0], "b": []}, {"b": [1.0]})


def test_one_value_has_no_interval():
    """With a single repeat nothing is known about the spread."""
    assert not mean_interval([3.0]).significant
    assert mean_interval([3.0]).relative_half_width == math.inf
    assert not bootstrap([np.array([3.0])], lambda x, axis: x.mean(axis), seed=0).significant


def test_mean_interval_is_students():
    """Three repeats 1, 2, 3: half width 4.303 · 1/√3."""
    interval = mean_interval([1.0, 2.0, 3.0])

    assert interval.high - interval.estimate == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
