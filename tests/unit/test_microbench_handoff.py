"""The hand-off: equal prompts by three ways, and the line through what the hop costs."""

from __future__ import annotations

import numpy as np
import pytest

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Role
from ppdbench.experiments.microbench.handoff import (
    HandoffPlan,
    Paired,
    Prompt,
    fit_hop,
    hop_finding,
)
from ppdbench.experiments.microbench.handoff_run import (
    Pair,
    measure_handoff,
    simulate_handoff,
    split_pair,
)
from ppdbench.experiments.microbench.plan import Limits
from ppdbench.sim.config import CONNECTORS, LINKS, SimConfig
from ppdbench.testing.fake import FakeEngine, Service


def test_prompts_are_cut_to_blocks_and_to_the_context():
    """A cached part is whole blocks, equal prompts count once, and too long ones are left out."""
    plan = HandoffPlan(tokens=(100, 1000, 9000), shares=(0.0, 0.5, 0.9))

    assert plan.prompts(128, 8192) == [
        Prompt(100, 0), Prompt(1000, 0), Prompt(1000, 384), Prompt(1000, 896),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no prompt"):
        plan.prompts(16, 50)
    with pytest.raises(UsageError, match="shares"):
        HandoffPlan(shares=(1.0,))


def test_a_conversation_ends_with_exactly_the_prompt_that_is_measured():
    """History, its one token of reply and the new tokens add up to the prompt."""
    plan = HandoffPlan(tokens=(1024,), shares=(0.0, 0.5))
    arrivals = plan.arrivals(plan.prompts(16, None), repeat=0, streams=0)
    turns = {a.conversation.id: a.conversation.turns for a in arrivals}

    cold, warm = turns["hop/1024/0"], turns["hop/1024/512"]
    assert [turn.new_tokens for turn in cold] == [1024]
    assert warm[0].new_tokens + warm[0].output_tokens + warm[1].new_tokens == 1024


def test_the_line_is_found_again():
    """Fixed and per-token cost that were put in come out, within their intervals."""
    rng = np.random.default_rng(0)
    pairs = [
        Paired(tokens, 0.065 + 11.4e-6 * tokens + 1e-4 * rng.standard_normal(8))
        for tokens in (128, 1024, 4096, 16384)
    ]
    fit = fit_hop(pairs, bytes_per_token=131072.0, seed=0)

    assert fit["fixed_s"] == pytest.approx(0.065, abs=2e-4)
    assert fit["fixed_ci"][0] < 0.065 < fit["fixed_ci"][1]
    assert fit["bandwidth_bytes_per_s"] == pytest.approx(11.5e9, rel=0.02)
    assert max(abs(r["residual_s"]) for r in fit["residuals"]) < 3e-4
    assert "65." in hop_finding({"0": fit})


def test_too_little_gives_no_fit():
    """Two prompts or one repeat make no line with an interval."""
    assert fit_hop([Paired(1, np.ones(5)), Paired(2, np.ones(5))], None, 0) is None
    assert fit_hop([Paired(i, np.ones(1)) for i in range(5)], None, 0) is None
    assert "too few" in hop_finding({"0": None})


@pytest.mark.parametrize("connector", ["nixl", "p2p_nccl"])
def test_the_simulators_own_hop_is_measured_back(connector):
    """The per-token cost is the link's and the connector's; the fixed one has hop and steps."""
    plan = HandoffPlan(tokens=(512, 4096, 16384), shares=(0.0, 0.5), load_streams=(0,), repeats=2)
    config = SimConfig(connector=connector)
    found = simulate_handoff(plan, config, keep_records=False).document()
    fit, profile = found["fits"]["0"], CONNECTORS[connector]

    wire_s = 131072 / LINKS[config.link]
    in_steps_s = profile.send_token_s + profile.receive_token_s
    assert fit["per_token_s"] == pytest.approx(profile.token_s + in_steps_s + wire_s, rel=0.1)
    fixed_s = profile.hop_s + profile.send_s + profile.receive_s
    assert fixed_s < fit["fixed_s"] < fixed_s + 0.02
    assert found["failed_turns"] == 0


@pytest.mark.slow
async def test_the_ways_run_over_http_on_a_pair():
    """Remote goes through P, local and one node do not, and each says what was cached."""
    service = Service(first_token_s=0.004, per_token_s=0.001)
    plan = HandoffPlan(
        tokens=(64, 128), shares=(0.0, 0.5), load_streams=(0,),
        gap_s=0.15, repeats=1,
    )  # fmt: skip
    async with FakeEngine(service=service) as p, FakeEngine(service=service) as d:
        spec = ClusterSpec((Node("p0", Role.P, p.url), Node("d0", Role.D, d.url)))
        pair = Pair(spec, "fake", Limits(context_tokens=4096, block_tokens=16))
        found = await measure_handoff(plan, pair, lambda _: None)
    rows = found.document()["rows"]
    idle = {(r["way"], r["prompt_tokens"], r["context_tokens"]): r for r in rows
            if r["load_streams"] == 0}  # fmt: skip

    assert found.failed_turns == found.unproven_points == 0
    assert set(idle) == {
        ("one_node", 64, 0), ("one_node", 64, 32), ("one_node", 128, 0), ("one_node", 128, 64),
        ("local", 64, 32), ("local", 128, 64),
        ("remote", 64, 0), ("remote", 64, 32), ("remote", 128, 0), ("remote", 128, 64),
    }  # fmt: skip
    assert {row["repeats"] for row in rows} == {1}
    for way in ("local", "remote"):
        row = idle[way, 128, 64]
        assert row["cached_tokens_min"] == row["cached_tokens_max"] == 64
    assert idle["remote", 128, 64]["ttft_s"] > idle["local", 128, 64]["ttft_s"]


def test_the_hand_off_needs_both_nodes():
    """Replicas alone have no hop to measure."""
    with pytest.raises(UsageError, match="needs a P and a D"):
        split_pair(ClusterSpec((Node("r0", Role.R, "http://127.0.0.1:1"),)))
