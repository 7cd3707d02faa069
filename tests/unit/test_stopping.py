"""Repeats go on until the means of all compared routes are known."""

from __future__ import annotations

from ppdbench.experiments.stopping import StopRule
from ppdbench.runs.points import PointKey


def key(repeat, policy="remote", rate=1.0):
    return PointKey("2P_2D", policy, "w", rate, repeat)


def point(ttft, tpot=0.01, validity=()):
    return {
        "validity": list(validity),
        "turn2plus": {"ttft_s": {"mean": ttft}, "tpot_s": {"mean": tpot}},
    }


def after(*points, width=0.05, policy="remote"):
    rule = StopRule(width)
    for repeat, each in enumerate(points):
        rule.saw(key(repeat, policy), each)
    return rule


def test_two_repeats_are_never_enough():
    """However equal they are."""
    assert after(point(0.1), point(0.1)).wants(key(2))
    assert not after(point(0.1), point(0.1), point(0.1)).wants(key(3))


def test_both_metrics_must_be_known():
    """A steady TTFT does not excuse a TPOT that jumps."""
    steady = [point(0.1), point(0.1001), point(0.0999)]
    jumping = [point(0.1, 0.01), point(0.1, 0.02), point(0.1, 0.03)]

    assert not after(*steady).wants(key(3))
    assert after(*jumping).wants(key(3))


def test_a_place_stays_open_for_all_its_policies():
    """Routes that are compared keep equal repeats."""
    rule = after(point(0.1), point(0.1), point(0.1))
    for repeat, ttft in enumerate([0.1, 0.2, 0.3]):
        rule.saw(key(repeat, "local"), point(ttft))

    assert rule.wants(key(3, "remote"))
    assert rule.wants(key(3, "remote", rate=2.0))


def test_points_that_may_not_vote_and_later_repeats_do_not_count():
    """Three of which one is contaminated are two; a repeat is not judged by its successors."""
    bad = point(0.1, validity=["cache_contaminated"])

    assert after(point(0.1), point(0.1), bad).wants(key(3))
    assert after(point(0.1), point(0.1), point(0.1)).wants(key(1))


def test_what_is_left_out_is_known():
    """So that a sweep can tell a point that was left out from one that was lost."""
    rule = after(point(0.1), point(0.1), point(0.1))
    rule.wants(key(3))
    rule.wants(key(0))

    assert rule.left_out == {key(3).slug}
