"""Simulated nodes over HTTP: the hand-off, the caches and the counters of a real P and D."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from ppdbench.cluster.nixl import (
    decode_body,
    local_body,
    prefill_body,
    read_prefilled,
    release_body,
)
from ppdbench.core.topology import Role
from ppdbench.http.client import Pool
from ppdbench.http.messages import Origin, Request
from ppdbench.sim.cluster import Capacity
from ppdbench.sim.config import Overheads, SimConfig
from ppdbench.sim.costs import CostTables
from ppdbench.sim.engine import SimEngine

FAST = CostTables(
    dense_s=[0.0, 1e-3, 1e-3],
    batches=(1, 2),
    contexts=(0, 1024),
    decode_attention_s=((0.0, 0.0), (0.0, 0.0)),
    chunks=(0, 1024),
    prefixes=(0, 1024),
    prefill_attention_s=((0.0, 0.0), (0.0, 0.0)),
    source="test",
)
CONFIG = SimConfig(overheads=Overheads(0.0, 0.0, 0.0, 0.0))
CAPACITY = Capacity(blocks=64, kv_bytes_per_token=1000, context_tokens=1024)


@asynccontextmanager
async def nodes(*roles: Role):
    engines = [SimEngine(role, CONFIG, FAST, CAPACITY, model="m") for role in roles]
    pool = Pool()
    for engine in engines:
        await engine.start()
    try:
        yield engines, lambda engine, body: ask(pool, engine, body)
    finally:
        await pool.close()
        for engine in engines:
            await engine.close()


async def test_a_node_tells_when_it_was_started():
    """As vLLM does: a router knows by it that a node is another process, and its cache empty."""
    before_s = time.time()
    async with nodes(Role.R) as ((engine,), _):
        line = next(ln for ln in engine.metrics().splitlines() if ln.startswith("process_start"))

    assert before_s <= float(line.removeprefix("process_start_time_seconds ")) <= time.time()


async def ask(pool: Pool, engine: SimEngine, body: dict) -> dict:
    origin = Origin("http", "127.0.0.1", int(engine.url.rsplit(":", 1)[1]))
    request = Request.json("/v1/completions", body)
    return (await pool.fetch(origin, request)).json()


def body(ids: list[int], max_tokens: int = 8) -> dict:
    return {"model": "m", "prompt": ids, "max_tokens": max_tokens, "return_token_ids": True}


def value(engine: SimEngine, name: str) -> float:
    line = next(line for line in engine.metrics().splitlines() if name in line)
    return float(line.rsplit(" ", 1)[1])


async def test_a_hand_off_gives_the_tokens_of_one_node_alone():
    """P then D answers as R does, D computes one token, and P's blocks are free again."""
    prompt = list(range(100, 200))
    async with nodes(Role.P, Role.D, Role.R) as ((p, d, r), answer):
        prefilled = read_prefilled(await answer(p, prefill_body(body(prompt))))
        disaggregated = await answer(d, decode_body(body(prompt), prefilled))
        alone = await answer(r, local_body(body(prompt)))

        assert disaggregated["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        assert value(d, 'source="local_compute"') == 1
        assert value(d, "nixl_bytes_transferred_sum") == 99 * 1000
        assert value(p, "kv_cache_usage_perc") == 0


async def test_a_local_turn_finds_its_history_and_moves_nothing():
    """The next turn on the same D computes what is new and the last partial block."""
    prompt = list(range(100, 180))
    async with nodes(Role.D) as ((d,), answer):
        first = await answer(d, local_body(body(prompt)))
        history = prompt + first["choices"][0]["token_ids"]
        later = await answer(d, local_body(body([*history, 1, 2, 3])))

        assert later["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        assert value(d, "nixl_bytes_transferred_sum") == 0


async def test_conversations_share_a_system_prompt():
    """Content, not conversation, decides what is cached."""
    system = list(range(500, 564))
    async with nodes(Role.R) as ((r,), answer):
        await answer(r, body([*system, *range(30)]))
        other = await answer(r, body([*system, *range(900, 930)]))

        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def test_a_refused_hand_off_frees_the_blocks_on_p():
    """The body that a router sends when it will not ask D after all releases P at once."""
    async with nodes(Role.P, Role.D) as ((p, d), answer):
        prefilled = read_prefilled(await answer(p, prefill_body(body(list(range(64))))))
        assert value(p, "kv_cache_usage_perc") > 0
        await answer(d, release_body(prefilled))

        async with asyncio.timeout(5):
            while value(p, "kv_cache_usage_perc") > 0:  # noqa: ASYNC110 - a counter, as users see
                await asyncio.sleep(0.005)


async def test_a_prompt_that_never_fits_is_refused():
    """The node says so at once instead of waiting for memory that will not come."""
    async with nodes(Role.R) as ((r,), answer):
        refusal = await answer(r, body(list(range(1020)), max_tokens=100))

        assert refusal["error"]["code"] == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_takes_a_step_per_token(stream):
    """Tokens are paced by the cost model: twenty steps of a millisecond are at least 20 ms."""
    async with nodes(Role.R) as ((r,), _):
        loop = asyncio.get_running_loop()
        origin = Origin("http", "127.0.0.1", int(r.url.rsplit(":", 1)[1]))
        pool, began = Pool(), loop.time()
        asked = body(list(range(20)), max_tokens=20) | {"stream": stream}
        response = await pool.fetch(origin, Request.json("/v1/completions", asked))
        await pool.close()

        assert response.ok
        assert loop.time() - began >= 0.020
