"""The score: what follows from weights and figures, whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ppdbench.core.errors import UsageError
from ppdbench.table.score import STATISTICS, Choice, Guard, Rule, Side, Slo, Status, judge

seconds = st.floats(1e-4, 100)
weights = st.floats(1e-3, 1e3)


def side(ttft_s, tpot_s, n=50, success=1.0, tail=None):
    stats = dict.fromkeys(STATISTICS)
    return Side(
        n, success, {**stats, "mean": ttft_s}, {**stats, "mean": tpot_s}, {**stats, "p99": tail}
    )


pairs = st.tuples(st.builds(side, seconds, seconds), st.builds(side, seconds, seconds))


@given(pairs, weights, weights, st.floats(1e-3, 1e3))
def test_rescaling_both_weights_changes_nothing(pair, w_ttft, w_tpot, factor):
    """Only the ratio of the weights matters."""
    before = judge(*pair, Rule(w_ttft, w_tpot))
    after = judge(*pair, Rule(w_ttft * factor, w_tpot * factor))

    size = w_ttft * abs(before.d_ttft) + w_tpot * abs(before.d_tpot)
    assume(abs(before.s) > 1e-12 * size)  # a tie to the last bit may round either way
    assert before.choice is after.choice


@given(pairs, weights, weights, weights)
def test_a_higher_tpot_weight_never_wins_local_where_local_costs_tpot(pair, w_ttft, w_tpot, more):
    """Raising w_tpot never turns remote into local where Δ_tpot > 0."""
    before = judge(*pair, Rule(w_ttft, w_tpot))
    after = judge(*pair, Rule(w_ttft, w_tpot + more))

    if before.d_tpot > 0 and before.choice is Choice.REMOTE:
        assert after.choice is Choice.REMOTE


def test_the_deltas_are_the_papers():
    """Δ_ttft is relative to remote and positive for a gain; Δ_tpot is positive for a cost."""
    verdict = judge(side(0.2, 0.010), side(0.1, 0.012), Rule(1, 2))

    assert verdict.d_ttft == pytest.approx(0.5)
    assert verdict.d_tpot == pytest.approx(0.2)
    assert verdict.s == pytest.approx(0.5 - 2 * 0.2)


@pytest.mark.parametrize("before", [0.0, -1.0, None])
def test_a_delta_without_a_positive_denominator_is_zero(before):
    """A remote figure that is 0, negative or unknown decides nothing, and a tie goes remote."""
    verdict = judge(side(before, before), side(0.1, 0.1), Rule())

    assert (verdict.d_ttft, verdict.d_tpot, verdict.s) == (0, 0, 0)
    assert verdict.choice is Choice.REMOTE


@pytest.mark.parametrize(
    ("remote", "local", "floor", "expected"),
    [
        (0.94, 1.0, 0.95, (Choice.LOCAL, Status.ONE_SIDED)),
        (1.0, 0.94, 0.95, (Choice.REMOTE, Status.ONE_SIDED)),
        (0.5, 0.5, 0.95, (Choice.UNDECIDED, Status.FAILED)),
        (0.95, 0.95, 0.95, (Choice.LOCAL, Status.MEASURED)),
        (0.01, 1.0, 0.0, (Choice.LOCAL, Status.MEASURED)),
        (0.0, 1.0, 0.0, (Choice.LOCAL, Status.ONE_SIDED)),
    ],
)
def test_a_route_that_fails_is_no_route(remote, local, floor, expected):
    """Below the floor a side is infeasible; at floor 0 only a total failure is."""
    verdict = judge(
        side(0.2, 0.01, success=remote), side(0.1, 0.01, success=local), Rule(min_success=floor)
    )

    assert (verdict.choice, verdict.status) == expected
    assert (verdict.s is None) == (verdict.status is not Status.MEASURED)


def test_an_interval_that_holds_zero_decides_nothing():
    """The sign of S counts only where the bootstrap interval is on one side of 0."""
    sides = side(0.2, 0.01), side(0.1, 0.01)

    torn = judge(*sides, Rule(), {"d_ttft": [-100, 900, 5000], "d_tpot": [0, 0, 0]})
    sure = judge(*sides, Rule(), {"d_ttft": [4000, 5000, 6000], "d_tpot": [0, 0, 0]})

    assert torn.choice is Choice.UNDECIDED
    assert sure.choice is Choice.LOCAL
    assert sure.s_ci == pytest.approx((0.405, 0.595))


@pytest.mark.parametrize(
    ("text", "vetoed"),
    [
        ("tpot_p99=0.05", True),
        ("tpot_p99=0.06", False),
        ("tpot_p99=1.4x", True),
        ("tpot_p99=1.6x", False),
        ("tpot_p99=1.4", True),
        ("tpot_p99=1.6", False),
    ],
)
def test_the_guard_keeps_others_tpot(text, vetoed):
    """Local is vetoed where TPOT of all turns passes a limit in seconds, or a ratio to remote."""
    sides = side(0.2, 0.01, tail=0.036), side(0.1, 0.01, tail=0.054)

    verdict = judge(*sides, Rule(guard=Guard.parse(text)))

    assert verdict.vetoed is vetoed
    assert verdict.choice is (Choice.REMOTE if vetoed else Choice.LOCAL)


def test_the_slo_mode_counts_requests_inside_both_limits():
    """With limits instead of weights the route that keeps more requests inside them wins."""
    remote, local = side(0.1, 0.01), side(0.2, 0.01)
    rule = Rule(slo=Slo.parse("ttft=0.2,tpot=0.03"))

    verdict = judge(replace(remote, meets_slo=0.4), replace(local, meets_slo=0.6), rule)

    assert verdict.s == pytest.approx(0.2)
    assert verdict.choice is Choice.LOCAL
    with pytest.raises(UsageError, match="keep_records"):
        judge(remote, local, rule)


@pytest.mark.parametrize(
    "text", ["", "tpot=1", "ttft_p99=1", "tpot_p99=", "tpot_p99=-1", "tpot_p98=1"]
)
def test_a_wrong_guard_is_refused(text):
    """The message shows both forms."""
    with pytest.raises(UsageError, match=r"1\.2x"):
        Guard.parse(text)


@pytest.mark.parametrize(
    "text", ["", "ttft=0.2", "ttft=0.2,tpot=x", "ttft=0.2,tpot=0,e2e=1", "ttft=1,ttft=2,tpot=1"]
)
def test_wrong_limits_are_refused(text):
    """Both limits are needed, in seconds above 0."""
    with pytest.raises(UsageError, match="both limits"):
        Slo.parse(text)


@pytest.mark.parametrize(
    "wrong", [{"w_ttft": -1}, {"w_ttft": 0, "w_tpot": 0}, {"w_tpot": float("nan")}, {"stat": "p75"},
              {"min_success": 1.1}, {"min_n": 0}, {"max_distance": 0},
              {"max_distance": float("inf")}, {"w_ttft": 1e308, "w_tpot": 1e308}],
)  # fmt: skip
def test_a_rule_that_means_nothing_is_refused(wrong):
    """Weights, statistic and floors are checked before any run is read."""
    with pytest.raises(UsageError):
        Rule(**wrong)
