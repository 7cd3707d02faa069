"""Two runs, or two routes of one: paired, with an interval, and "not significant" where it is."""

from __future__ import annotations

import pytest

from ppdbench.core.decision import Route
from ppdbench.runs.compare import compare_policies, compare_runs
from ppdbench.runs.records import TurnRecord


def point(policy="remote", *, rate=1.0, ttft=0.1, validity=(), workload="w", repeat=0):
    metrics = {"ttft_s": {"mean": ttft}, "tpot_s": {"mean": 0.01}, "e2e_s": {"mean": 1.0}}
    return {
        "topology": "2P_2D", "policy": policy, "workload": workload, "rate_per_s": rate,
        "repeat": repeat, "validity": list(validity), "turn2plus": metrics,
    }  # fmt: skip


def of(differences, metric="ttft_s"):
    return next(d for d in differences if d.metric == metric)


def test_a_run_that_is_slower_everywhere_is_slower():
    """Rates differ tenfold, and pairing takes that out: +10 % stays +10 %."""
    first = [point(rate=r, ttft=0.1 * r) for r in (1.0, 2.0, 4.0, 10.0)]
    second = [point(rate=r, ttft=0.11 * r) for r in (1.0, 2.0, 4.0, 10.0)]

    found = of(compare_runs(first, second))

    assert found.change == pytest.approx(0.1)
    assert (found.verdict, found.points) == ("slower", 4)
    assert found.interval.low == pytest.approx(0.1)


def test_changes_that_cancel_are_not_significant():
    """Half the points faster, half slower: no verdict."""
    first = [point(rate=float(r)) for r in range(1, 9)]
    second = [point(rate=float(r), ttft=0.12 if r % 2 else 0.08) for r in range(1, 9)]

    assert of(compare_runs(first, second)).verdict == "not significant"


def test_one_pair_has_no_interval():
    """What nobody can know is said so."""
    found = of(compare_runs([point()], [point(ttft=0.2)]))

    assert (found.interval, found.verdict) == (None, "unknown")
    assert found.document()["change_ci"] is None


def test_points_that_may_not_vote_are_left_out():
    """A point of a contaminated cache compares with nothing."""
    bad = point(ttft=9.0, validity=["cache_contaminated"])

    assert compare_runs([point()], [bad]) == []


def turns(policy, delta):
    return [
        TurnRecord(
            f"c{i}", 2, Route.LOCAL, "d0", 0.0, 0.0,
            first_token_at_s=0.1 + i / 100 + delta, finished_at_s=1.0, output_tokens=11,
        )
        for i in range(40)
    ]  # fmt: skip


def test_policies_are_compared_by_their_conversations_where_turns_were_kept():
    """A gain of 5 ms under a spread of 400 ms between conversations is seen."""
    points = [point("remote"), point("local", ttft=0.29)]
    kept = {"remote": turns("remote", 0.0), "local": turns("local", -0.005)}

    found = of(compare_policies(points, "remote", "local", lambda p: kept[p["policy"]]))

    assert found.verdict == "faster"
    assert found.interval.estimate == pytest.approx(-0.005 / 0.295)


def test_policies_of_different_places_are_not_paired():
    """Another workload, rate or repeat is another place."""
    points = [point("remote"), point("local", rate=2.0), point("local", workload="v")]

    assert compare_policies(points, "remote", "local") == []
