"""KV events of a real vLLM with few blocks: what is evicted is cold before a turn is lost to it."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from tests.live.routed import ask, eventually, fetch, fresh_prompt, routing

from ppdbench.cluster.launch import LaunchOptions, launch
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.topology import Topology

BLOCKS = 24
"""Of 128 tokens."""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def small_caches(engine_python, tmp_path_factory):
    options = LaunchOptions(
        device=Device.CPU,
        max_model_len=2048,
        kv_events=True,
        engine_args=(f"--num-gpu-blocks-override={BLOCKS}",),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with launch(Topology.parse("1P_1D"), options, tmp_path_factory.mktemp("small")) as cluster:
        yield cluster


async def turn(router, prompt):
    """Its head, and the history that the next turn begins with."""
    answer = await ask(router.url, prompt)
    assert answer.ok, answer.body
    document = answer.json()
    return answer.head, document["usage"], [*prompt, *document["choices"][0]["token_ids"]]


@asynccontextmanager
async def listening(cluster):
    """A router that hears a D whose cache is empty; yields it and its view of D."""
    await clear(cluster.spec["d0"])
    async with routing(cluster.nodes) as router:
        d0 = router.upstreams["d0"]

        async def connected():
            return d0.kv_connected.get() == 1.0

        assert await eventually(connected, 20)
        yield router, d0


async def clear(node):
    """By vLLM's own call; it wants all blocks free, which they are a step after the last turn."""

    async def cleared():
        answer = await fetch(node, "POST", "/reset_prefix_cache")
        return answer.json() == {"success": True}

    assert await eventually(cleared, 20)


async def test_an_evicted_conversation_is_cold_and_a_later_one_stays_home(small_caches):
    """D loses the older of two conversations to others; no turn is lost before it is known."""
    async with listening(small_caches) as (router, d0):
        _, _, older = await turn(router, fresh_prompt(600))
        await asyncio.sleep(4)
        _, _, later = await turn(router, fresh_prompt(600))
        before_s, others = d0.gone_s.get(), 0
        while d0.gone_s.get() == before_s and others < BLOCKS:
            await turn(router, fresh_prompt(600))
            others += 1
            await asyncio.sleep(0.2)

        at_home, usage, _ = await turn(router, [*later, *fresh_prompt(20)])
        cold, _, _ = await turn(router, [*older, *fresh_prompt(20)])
        events, gaps = (
            router.services.metrics.board.total(name) for name in ("kv_events", "kv_events_gaps")
        )

    print(f"known after {others} other conversations and {events:.0f} events")
    assert 0 < others < BLOCKS
    assert at_home.get(b"x-ppd-route") == b"local"
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 512
    assert (cold.get(b"x-ppd-route"), cold.get(b"x-ppd-reason")) == (b"remote", b"cold")
    assert d0.lost_s.get() == 0.0, "a turn was lost"
    assert gaps == 0


async def test_a_cache_that_was_cleared_makes_all_of_it_cold(small_caches):
    """The engine says so with its next step, whoever's that is."""
    async with listening(small_caches) as (router, d0):
        _, _, history = await turn(router, fresh_prompt(300))
        await asyncio.sleep(1)
        cleared_at_s = time.time()
        await clear(small_caches.spec["d0"])
        await turn(router, fresh_prompt(300))

        async def known():
            return d0.gone_s.get() >= cleared_at_s

        assert await eventually(known, 20)
        head, _, _ = await turn(router, [*history, *fresh_prompt(20)])

    assert (head.get(b"x-ppd-route"), head.get(b"x-ppd-reason")) == (b"remote", b"cold")
