"""The same course on a simulated node and on an HTTP server."""

from __future__ import annotations

import pytest

from ppdbench.core.errors import EngineError, UsageError
from ppdbench.experiments.microbench.interference import measure, simulate
from ppdbench.experiments.microbench.live import LiveEngine, token_ids
from ppdbench.experiments.microbench.plan import InterferencePlan
from ppdbench.experiments.microbench.preflight import judge_probe, look
from ppdbench.experiments.microbench.script import Segment
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.runs.records import TurnRecord
from ppdbench.sim.config import SimConfig
from ppdbench.testing.fake import FakeEngine, Service

PLAN = InterferencePlan((2,), (512,), (64, 1024), repeats=2, doses_per_block=4)


def test_a_longer_prefill_slows_its_neighbours_more():
    """On the simulator a full prompt hurts more than its append, in each cell, and is proven."""
    found = simulate(PLAN, SimulatedEngine(SimConfig(), seed=0), explicit=True).document()
    by_dose = {(r["kind"], r["context_tokens"] + r["new_tokens"]): r for r in found["rows"]}

    assert found["unmeasured_doses"] == found["unproven_doses"] == 0
    for total in (576, 1536):
        full, append = by_dose["full", total], by_dose["append", total]
        assert full["slowdown_mean"] > append["slowdown_mean"] > 0
        assert full["injected_ttft_s"] > append["injected_ttft_s"]


def test_a_simulated_slowdown_is_the_prefills_own_time():
    """The victims' stall equals the growth of the step that holds the prompt, within a step."""
    engine = SimulatedEngine(SimConfig(), seed=0)
    row = simulate(PLAN, engine, explicit=True).document()["rows"][-1]

    assert row["kind"] == "full"
    assert row["stall_s_per_injected"] == pytest.approx(
        row["max_gap_s"] - row["itl_quiet_p50_s"], rel=0.15
    )


def test_equal_seeds_give_equal_simulated_rows():
    """Nothing but the seed decides."""
    first, second, other = (
        simulate(PLAN, SimulatedEngine(SimConfig(), seed=s), explicit=True).document()["rows"]
        for s in (0, 0, 1)
    )

    assert first == second
    assert first != other


async def test_the_course_runs_over_http_and_appends_are_proven():
    """Victims stream, doses go in between, the server's cached tokens prove each dose."""
    service = Service(first_token_s=0.002, per_token_s=0.001)
    plan = InterferencePlan(
        (2,), (128,), (16,), repeats=1, quiet_tokens=8, settle_tokens=4, doses=2,
        dose_rate_per_s=200.0,
    )  # fmt: skip
    async with FakeEngine(service=service) as server:
        engine = LiveEngine(server.url, "fake", seed=3)
        try:
            limits = await look(engine)
            found = await measure(plan, engine, limits, explicit=True, tell=lambda _: None)
        finally:
            await engine.close()

    rows = found.document()["rows"]
    assert limits.block_tokens == 16
    assert [row["kind"] for row in rows] == ["append", "full"]
    assert all(row["cache_proven"] for row in rows)
    assert rows[0]["cached_tokens_min"] == 128
    kept = [r for r in found.records if not r.warm_up]
    assert all(r.token_at_s == sorted(r.token_at_s) for r in kept)
    assert any(".victim" in r.conversation for r in kept)
    assert not any(".prime" in r.conversation for r in kept)


async def test_when_time_is_over_what_is_complete_is_the_result():
    """The run ends after the block in which time ran out; rows say how many repeats they have."""
    said: list[str] = []
    plan = InterferencePlan((1,), (128,), (16,), repeats=9, quiet_tokens=4, settle_tokens=2)
    async with FakeEngine(service=Service(per_token_s=0.0005)) as server:
        engine = LiveEngine(server.url, "fake", seed=3)
        try:
            limits = await look(engine)
            found = await measure(
                plan, engine, limits, explicit=True, tell=said.append, is_over=lambda: True
            )
        finally:
            await engine.close()

    assert {row["repeats"] for row in found.document()["rows"]} == {1}
    assert any("8 blocks are left out" in line for line in said)


async def test_an_engine_without_prefix_caching_is_refused_before_the_run():
    """A prompt sent twice that finds nothing cached ends the preflight."""
    async with FakeEngine(block_size=0) as server:
        engine = LiveEngine(server.url, "fake", seed=0)
        try:
            with pytest.raises(EngineError, match="without prefix caching"):
                await look(engine)
        finally:
            await engine.close()


async def test_a_batch_that_does_not_run_at_a_time_is_said_before_the_run():
    """The engine queues what is beyond its slots; the preflight finds that out."""
    service = Service(first_token_s=0.001, per_token_s=0.0005)
    plan = InterferencePlan((2, 8), (128,), (16,), repeats=1)
    async with FakeEngine(service=service, slots=4) as server:
        engine = LiveEngine(server.url, "fake", seed=0)
        try:
            limits = await look(engine, [batch + plan.doses for batch in plan.batches])
            with pytest.raises(UsageError, match=r"batch 8 \+ 1 exceeds the engine's 3"):
                await measure(plan, engine, limits, explicit=True, tell=print)
        finally:
            await engine.close()

    assert limits.batch == 3


async def test_another_model_than_the_served_one_is_refused():
    """The message lists what is served."""
    async with FakeEngine(model="fake") as server:
        engine = LiveEngine(server.url, "llama", seed=0)
        try:
            with pytest.raises(UsageError, match="serves fake"):
                await look(engine)
        finally:
            await engine.close()


def probe(cached: int | None, prompt: int = 1024) -> TurnRecord:
    from ppdbench.core.decision import Route

    return TurnRecord("probe", 1, Route.REPLICA, "r0", 0, 0, prompt_tokens=prompt,
                      cached_tokens=cached)  # fmt: skip


@pytest.mark.parametrize(
    ("cold", "warm", "other", "words"),
    [(0, None, 0, "does not say"), (0, 0, 0, "without prefix caching"),
     (0, 1024, 0, "cannot be used"), (0, 1008, 512, "never saw")],
)  # fmt: skip
def test_cached_tokens_that_cannot_be_true_are_refused(cold, warm, other, words):
    """Missing, absent, too many, and hits on a prompt that was never sent."""
    with pytest.raises(EngineError, match=words):
        judge_probe(probe(cold), probe(warm), probe(other), 1024)


@pytest.mark.parametrize(("warm", "block"), [(1008, 16), (896, 128)])
def test_the_probe_shows_the_block_size(warm, block):
    """What a repeated prompt could not reuse is its last block."""
    assert judge_probe(probe(0), probe(warm), probe(0), 1024) == block


def test_equal_segments_are_equal_tokens():
    """Names, not places, decide the tokens; the seed changes them all."""
    context = Segment("context/1", 64)

    assert token_ids([context], 1) == token_ids([context, Segment("new", 8)], 1)[:64]
    assert token_ids([context], 1) != token_ids([context], 2)
