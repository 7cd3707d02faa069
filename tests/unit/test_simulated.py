"""A simulated point: routes differ where they must, and equal arguments give equal records."""

from __future__ import annotations

from statistics import median

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.core.topology import Topology
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.runs.points import PointOutcome
from ppdbench.sim.config import SimConfig

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


def test_local_beats_remote_on_ttft_when_the_cluster_is_idle():
    """An append on the node that holds the KV needs no hop."""
    assert later_ttft_s(run("2P_2D", "local")) < later_ttft_s(run("2P_2D", "remote"))


def test_a_configuration_is_its_dictionary():
    """Manifests keep the dictionary, and it gives the configuration back."""
    config = SimConfig(connector="p2p_nccl", retokenisation_loss=0.25)

    assert SimConfig.from_dict(config.as_dict()) == config
