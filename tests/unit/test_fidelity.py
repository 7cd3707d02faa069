"""The comparison with the authors' sweep: their client emulated, errors and winners counted."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest

from ppdbench.core.topology import Topology
from ppdbench.experiments.fidelity import (
    PARAMETERS,
    AuthorsPolicy,
    Guess,
    authors_arrivals,
    identity_lost,
    measured,
    predict,
)
from ppdbench.experiments.fidelity_report import Pair, as_markdown, errors, report, same_winner
from ppdbench.load.simulated import run_simulated_point


def point(topology: str, ttft_s: float, tpot_s: float = 0.010, n: int = 40) -> dict:
    turn = {
        "n": n,
        "ttft_s": {"p50": ttft_s, "mean": ttft_s * 1.1},
        "tpot_s": {"p50": tpot_s, "mean": tpot_s},
    }
    return {
        "topology": topology, "workload": "large_tiny", "rate_per_s": 4.0,
        "turn1": turn, "turn2plus": turn,
    }  # fmt: skip


def pair(topology: str, real_s: float, predicted_s: float, n: int = 40) -> Pair:
    there = point(topology, real_s, n=n)
    return Pair(there, [measured(there) | {("turn2plus", "ttft_s"): predicted_s}])


def test_the_emulated_client_sends_what_the_authors_sent():
    """As many conversations as were counted, within ten seconds, in order, with true lengths."""
    arrivals = authors_arrivals(point("4R", 0.06, n=37), seed=1)
    times = [arrival.at_s for arrival in arrivals]

    assert len(arrivals) == 37
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 10
    assert [t.new_tokens for t in arrivals[0].conversation.turns] == [1228, 28]
    assert authors_arrivals(point("4R", 0.06, n=37), seed=1) == arrivals


def test_their_client_stops_when_its_conversations_are_used_up():
    """It sends ten times the rate at most: a point that has them all ended before ten seconds."""
    ends_s = [authors_arrivals(point("4R", 0.06, n=40), seed)[-1].at_s for seed in range(1, 41)]

    assert max(ends_s) < 10
    assert fmean(ends_s) < 9.2


def test_their_proxy_loses_the_share_of_identities_that_its_code_implies():
    """2/3 · 1/3 of later turns and a little: those go remote even on a pD."""
    lost = sum(identity_lost(f"c{i}/2") for i in range(20_000)) / 20_000

    assert lost == pytest.approx(0.226, abs=0.01)


def test_their_placement_follows_the_hash_not_the_load():
    """Homes are drawn, so counts differ by chance; ours would differ by at most one."""
    from ppdbench.experiments.fidelity import AuthorsPlay

    arrivals = authors_arrivals(point("4R", 0.06, n=200), seed=2)
    outcome = run_simulated_point(
        Topology.parse("4R"),
        AuthorsPolicy(),
        arrivals,
        20,
        Guess().config(),
        2,
        make_play=AuthorsPlay,
        connections=50,
    )
    homes = Counter(r.node for r in outcome.records if r.turn == 1)

    assert set(homes) == {"r0", "r1", "r2", "r3"}
    assert max(homes.values()) - min(homes.values()) > 1


def test_no_more_than_fifty_requests_are_ever_open():
    """The client's cap holds, and what waits behind it counts as TTFT."""
    records = run_simulated_point(
        Topology.parse("4R"),
        AuthorsPolicy(),
        authors_arrivals(point("4R", 0.06, n=200), seed=2),
        20,
        Guess().config(),
        2,
        connections=50,
    ).records
    edges = sorted([(r.sent_at_s, 1) for r in records] + [(r.finished_at_s, -1) for r in records])
    open_now = peak = 0
    for _, step in edges:
        open_now += step
        peak = max(peak, open_now)

    assert peak == 50
    assert max(r.sent_at_s - r.scheduled_at_s for r in records) > 1


def test_errors_are_relative_to_what_was_measured():
    """+10 %, −20 % and 0: median 10 %, and the signed median is 0."""
    found = errors([pair("4R", 0.1, 0.11), pair("4R", 0.1, 0.08), pair("4R", 0.1, 0.1)])

    assert found["ttft_s"]["median"] == pytest.approx(0.1)
    assert found["ttft_s"]["bias"] == 0


@pytest.mark.parametrize(
    ("remote", "local", "verdict"),
    [
        ((0.15, 0.14), (0.06, 0.07), True),
        ((0.15, 0.05), (0.06, 0.07), False),
        ((0.150, 0.05), (0.145, 0.07), None),
    ],
)
def test_a_winner_counts_only_where_the_real_difference_exceeds_5_percent(remote, local, verdict):
    """Agreement is about the sign; below the band there is no winner to agree on."""
    assert same_winner(pair("2P_2D", *remote), pair("2P_2pD", *local), "ttft_s") is verdict


def test_the_report_names_its_parameters_and_counts_its_comparisons():
    """How many numbers were fitted stands in it; one pair agrees, one of few turns is apart."""
    pairs = [pair(name, 0.1, 0.1) for name in ("4R", "1P_3D")]
    pairs += [pair("2P_2D", 0.15, 0.14, n=10), pair("2P_2pD", 0.06, 0.07, n=10)]
    document = report([*pairs, *others()], left_out=3, guess=Guess(), seeds=1)
    tally = document["winners"]["core"]["ttft_s"]

    assert document["fitted_parameters"] == len(PARAMETERS) == 13
    assert tally["all"] == {"same": 1, "of": 1, "share": 1.0}
    assert tally["with_30_turns"]["of"] == 0
    assert "| 2P_2D (fitted) | 1 |" in as_markdown(document)


def test_a_part_of_the_sweep_is_reported_without_the_rest():
    """A topology that is not there has no row, and no error of nothing."""
    document = report([pair("4R", 0.1, 0.11)], left_out=0, guess=Guess(), seeds=1)

    assert list(document["topologies"]) == ["4R"]
    assert document["fourteen_not_fitted"] is None
    assert "fourteen" not in as_markdown(document)


def others() -> list[Pair]:
    """One point of every topology that the report wants and the test does not."""
    from ppdbench.core.topology import NAMED_TOPOLOGIES

    there = ("4R", "1P_3D", "2P_2D", "2P_2pD")
    names = [name for name in NAMED_TOPOLOGIES if name not in there]
    return [pair(name, 0.1, 0.1, n=50) for name in names]


def test_a_prediction_is_the_same_every_time():
    """It depends on the point, the guess and the seeds alone."""
    there = point("2P_2pD", 0.06)

    assert predict(there, Guess(), (1, 2)) == predict(there, Guess(), (1, 2))
