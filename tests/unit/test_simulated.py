"""A simulated point: routes differ where they must, and equal arguments give equal records."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean, median

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Topology
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.runs.points import PointOutcome
from ppdbench.runs.records import TurnRecord
from ppdbench.sim.config import SimConfig, Straggler

ARRIVALS = [
    Arrival(0.4 * i, Conversation(f"c{i}", (Turn(1024, 128), Turn(64, 64), Turn(64, 32))))
    for i in range(12)
]


def run(topology: str, policy: str, **changes) -> PointOutcome:
    config = SimConfig(**changes)
    return run_simulated_point(
        Topology.parse(topology), parse_policy(policy), ARRIVALS, 2.5, config, seed=3
    )


def later_ttft_s(outcome: PointOutcome) -> float:
    return median(r.ttft_s for r in outcome.records if r.turn > 1)


def test_equal_arguments_give_equal_records():
    """Two simulations in one process do not touch each other."""
    assert run("2P_2D", "remote").records == run("2P_2D", "remote").records


@pytest.mark.parametrize("policy", ["remote", "local", "pull", "share:0.5"])
def test_every_turn_ends_with_its_tokens(policy):
    """No turn is lost, and each gets the tokens it asked for in time order."""
    records = run("1P_2D", policy).records

    assert len(records) == 36
    assert all(r.output_tokens == r.wanted_output_tokens for r in records)
    assert all(r.scheduled_at_s < r.first_token_at_s <= r.finished_at_s for r in records)


def test_a_local_turn_moves_no_kv_and_computes_only_what_is_new():
    """History is cached but for the last partial block and the last token of the reply."""
    local = [r for r in run("1P_2D", "local").records if r.turn > 1]

    assert all(r.route is Route.LOCAL and r.bytes_moved == 0 for r in local)
    assert all(r.recomputed_tokens <= 16 for r in local)


def test_pull_spares_the_recomputation_of_the_reply():
    """On P, remote recomputes the reply that only D has; pull reads it from D."""
    remote = sum(r.recomputed_tokens for r in run("1P_2D", "remote").records)
    pull = sum(r.recomputed_tokens for r in run("1P_2D", "pull").records)

    assert remote > 12 * 128
    assert pull < remote / 4


def test_a_lost_reply_is_computed_again():
    """With every reply lost to re-tokenisation a local turn recomputes at least the reply."""
    lost = [r for r in run("1P_2D", "local", retokenisation_loss=1.0).records if r.turn == 2]

    assert all(r.recomputed_tokens >= 128 - 16 for r in lost)


def test_a_straggler_is_slow_alone():
    """The turns of the named node take longer, no others; a name that is not there does nothing."""
    plain, slow = (
        run("2R", "roles", straggler=straggler).records
        for straggler in (None, Straggler("r1", 3.0))
    )
    elsewhere = run("2R", "roles", straggler=Straggler("d7", 3.0)).records

    assert [r for r in slow if r.node == "r0"] == [r for r in plain if r.node == "r0"]
    assert mean_ttft_s(slow, "r1") > 1.3 * mean_ttft_s(plain, "r1")
    assert elsewhere == plain


def mean_ttft_s(records: list[TurnRecord], node: str) -> float:
    return fmean(r.ttft_s for r in records if r.node == node)


def test_local_beats_remote_on_ttft_when_the_cluster_is_idle():
    """An append on the node that holds the KV needs no hop."""
    assert later_ttft_s(run("2P_2D", "local")) < later_ttft_s(run("2P_2D", "remote"))


def test_a_configuration_is_its_dictionary():
    """Manifests keep the dictionary, and it gives the configuration back."""
    config = SimConfig(
        connector="p2p_nccl", retokenisation_loss=0.25, straggler=Straggler("r0", 2.4)
    )

    assert SimConfig.from_dict(config.as_dict()) == config


def test_a_connector_that_cannot_pull_makes_it_remote():
    """As a live turn whose pull is refused: the record says what was done, and why."""
    pulled = [r for r in run("1P_2D", "pull").records if r.turn == 2]
    pushed = [r for r in run("1P_2D", "pull", connector="p2p_nccl").records if r.turn == 2]

    assert {r.route for r in pulled} == {Route.PULL}
    assert {(r.route, r.reason) for r in pushed} == {(Route.REMOTE, "no_pull,connector")}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"max_batched_tokens": 0}, "max_batched_tokens is 0; expected a whole number from 1"),
        ({"max_batched_tokens": 10**9}, "expected a whole number from 1 to 1,000,000"),
        ({"max_sequences": 0}, "max_sequences is 0; expected a whole number from 1 on"),
        ({"block_tokens": 16.5}, r"block_tokens is 16\.5; expected a whole number"),
        ({"gpu_memory_utilization": 2.0}, r"is 2\.0; expected a share from 0 to 1"),
        ({"compute_factor": -1}, "compute_factor is -1; expected a number above 0"),
        ({"compute_factor": float("inf")}, "compute_factor is inf; expected a number above 0"),
        ({"max_context_tokens": 0}, "max_context_tokens is 0; expected a whole number from 1 on"),
        ({"prefix_caching": "no"}, "prefix_caching is 'no'; expected true or false"),
        ({"retokenisation_loss": "x"}, "retokenisation_loss is 'x'; expected a share"),
        ({"model": 5}, "model is 5; expected a text"),
        ({"link": []}, "link is .*; expected a text"),
        ({"overheads": {"foo": 1}}, "overheads is .*; expected a table of step_s, sequence_s"),
        ({"overheads": "x"}, "overheads is 'x'; expected a table of step_s"),
        ({"overheads": {"step_s": -1}}, "step_s is -1; expected a number from 0 on"),
        ({"connector_profile": {"name": "x"}}, "connector_profile is .*; expected a table of name"),
        ({"straggler": {"node": 3, "slowdown": 2}}, "straggler node is 3; expected a node's name"),
        ({"straggler": {"node": "r0", "slowdown": float("inf")}}, "slowdown is inf; expected"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings, what):
    """Of a grid's ``[settings]``: which one, its value, what is taken; never a traceback."""
    with pytest.raises(UsageError, match=what):
        SimConfig.from_dict(settings)


@pytest.mark.parametrize("straggler", ["r0", {"node": "r0"}, {"node": "r0", "slowdown": 0}])
def test_a_straggler_needs_a_name_and_a_slowdown(straggler):
    """As a grid file's ``[settings]`` may give it; the message shows the right form."""
    with pytest.raises(UsageError, match=r"straggler.* as .*2\.4"):
        SimConfig.from_dict({"straggler": straggler})


def test_token_times_agree_with_the_record():
    """First and last instants are the record's, there is one per token, and they only rise."""
    for record in run("1P_2D", "share:0.5", token_times=True).records:
        times = record.token_at_s

        assert len(times) == record.output_tokens
        assert times[0] == pytest.approx(record.first_token_at_s, abs=1e-9)
        assert times[-1] == pytest.approx(record.finished_at_s, abs=1e-9)
        assert times == sorted(times)


def test_token_times_change_nothing_else():
    """Watching does not disturb: every other field is as without."""
    watched = run("1P_2D", "remote", token_times=True).records
    for record in watched:
        record.token_at_s = []

    assert watched == run("1P_2D", "remote").records


def test_a_trace_shows_steps_transfers_and_requests(tmp_path):
    """Chrome's format; a node's steps follow one another, and every turn has begin and end."""
    path = tmp_path / "traces" / "point.json"
    run_simulated_point(
        Topology.parse("1P_2D"),
        parse_policy("remote"),
        ARRIVALS,
        2.5,
        SimConfig(),
        seed=3,
        trace=path,
    )
    events = json.loads(path.read_text())["traceEvents"]
    steps = sorted(
        (e["ts"], e["dur"]) for e in events if e.get("tid") == "steps" and e["pid"] == "d0"
    )

    assert {e["pid"] for e in events} == {"p0", "d0", "d1"}
    assert sum(e.get("tid") == "transfers" for e in events) == 36
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events) == 36
    assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in pairwise(steps))
