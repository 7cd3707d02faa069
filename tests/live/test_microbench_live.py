"""The micro-benchmark on real vLLM: doses are what they claim, and the hop costs something."""

from __future__ import annotations

import asyncio

import pytest

from ppdbench.experiments.microbench.handoff import HandoffPlan
from ppdbench.experiments.microbench.handoff_run import Pair, measure_handoff
from ppdbench.experiments.microbench.interference import measure
from ppdbench.experiments.microbench.live import LiveEngine
from ppdbench.experiments.microbench.plan import InterferencePlan
from ppdbench.experiments.microbench.preflight import look

pytestmark = pytest.mark.full

PLAN = InterferencePlan((1, 4), (1024,), (64, 1024), repeats=3)


async def interfere(node, model):
    engine = LiveEngine(node.url, model, seed=11, node=node.name)
    try:
        limits = await look(engine, [batch + 1 for batch in PLAN.batches])
        return limits, await measure(PLAN, engine, limits, explicit=True, tell=print)
    finally:
        await engine.close()


def test_doses_are_proven_and_a_long_full_prompt_stalls_more_than_its_append(one_p_one_d):
    """Every counted dose had exactly its context cached; 2,048 new tokens stall more than 1,024."""
    node, model = one_p_one_d.spec["d0"], one_p_one_d.facts.model
    limits, found = asyncio.run(interfere(node, model))
    document = found.document()
    rows = {(r["kind"], r["batch"], r["context_tokens"] + r["new_tokens"]): r
            for r in document["rows"]}  # fmt: skip

    assert (limits.context_tokens, limits.block_tokens, limits.batch) == (8192, 128, 5)
    assert len(rows) == len(PLAN.cells())
    assert all(row["cache_proven"] for row in rows.values())
    for batch in PLAN.batches:
        full, append = rows["full", batch, 2048], rows["append", batch, 2048]
        assert append["cached_tokens_min"] == append["cached_tokens_max"] == 1024
        assert full["max_gap_mean_s"] > append["max_gap_mean_s"]


def test_the_way_through_p_takes_longer_than_the_same_turn_at_home(one_p_one_d):
    """TTFT of equal prompts, half cached: local on D is faster, and each turn's cache is right."""
    facts = one_p_one_d.facts
    plan = HandoffPlan((1024, 2048), (0.5,), (0,), gap_s=0.8, repeats=3)
    node = one_p_one_d.spec["d0"]

    async def run():
        engine = LiveEngine(node.url, facts.model, seed=12)
        try:
            limits = await look(engine)
        finally:
            await engine.close()
        pair = Pair(one_p_one_d.spec, facts.model, limits)
        return await measure_handoff(plan, pair, print)

    found = asyncio.run(run())
    rows = {(r["way"], r["prompt_tokens"]): r for r in found.document()["rows"]}

    assert found.failed_turns == found.unproven_points == 0
    assert found.bytes_per_token == 2048
    for tokens in plan.tokens:
        assert rows["local", tokens]["cached_tokens_min"] == tokens // 2
        assert rows["local", tokens]["ttft_s"] < rows["remote", tokens]["ttft_s"]
