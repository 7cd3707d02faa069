"""The router before a real 1P_1D."""

from __future__ import annotations

import asyncio
import random

import pytest

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.http.client import Pool
from ppdbench.http.messages import Origin, Request
from ppdbench.router.config import RouterConfig
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer
from ppdbench.router.worker import Router

pytestmark = pytest.mark.full

openai = pytest.importorskip("openai")
POLL_S = 0.25
LEASE_S = 12
"""As the fixture starts its nodes."""


@pytest.fixture
async def router(one_p_one_d):
    cluster = ClusterSpec(tuple(one_p_one_d.nodes))
    config = RouterConfig(cluster=cluster, policy="local", port=0)
    shared = Shared.over(make_buffer(config), config, 0)
    async with Router(config, load_policy(config), shared) as router:
        yield router


async def test_five_streamed_turns_by_the_openai_package(one_p_one_d, router):
    """All turns succeed, affinity is complete, and later turns are computed on D alone."""
    messages, seen = [], []
    before = one_p_one_d.counters()
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        for turn in range(5):
            messages.append({"role": "user", "content": f"question {turn}: and then?"})
            raw = await client.chat.completions.with_raw_response.create(
                model=one_p_one_d.facts.model,
                messages=messages,
                stream=True,
                max_tokens=16,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            seen.append((raw.headers["x-ppd-route"], raw.headers["x-ppd-node"]))
            pieces = [c.choices[0].delta.content or "" async for c in raw.parse() if c.choices]
            messages.append({"role": "assistant", "content": "".join(pieces)})
    after = one_p_one_d.counters()

    assert seen == [("remote", "d0"), *[("local", "d0")] * 4]
    assert after["p0"].counters.since(before["p0"].counters).finished_requests == 1
    assert after["d0"].counters.since(before["d0"].counters).transfers == 1


async def test_tokens_equal_those_of_one_engine_alone(one_p_one_d, router):
    """Temperature 0, token-id histories: three turns through the router and cold on D."""
    pool, picks = Pool(), random.Random(7)
    prompt = [picks.randrange(5, 4000) for _ in range(400)]
    body = {"model": one_p_one_d.facts.model, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    routes = []
    try:
        for turn in range(3):
            request = Request.json("/v1/completions", body | {"prompt": prompt})
            answer = await pool.fetch(Origin.parse(router.url), request, timeout_s=120)
            salted = body | {"prompt": prompt, "cache_salt": f"alone-{turn}"}
            alone = await pool.fetch(
                Origin.parse(one_p_one_d.spec["d0"].url),
                Request.json("/v1/completions", salted),
                timeout_s=120,
            )
            routes.append(answer.head.get(b"x-ppd-route"))
            ids = answer.json()["choices"][0]["token_ids"]
            assert ids == alone.json()["choices"][0]["token_ids"]
            prompt = [*prompt, *ids, *(picks.randrange(5, 4000) for _ in range(40))]
    finally:
        await pool.close()

    assert routes == [b"remote", b"local", b"local"]


async def test_a_prompt_that_is_too_long_is_the_engines_own_400(one_p_one_d, router):
    """P's refusal reaches the client as P said it."""
    pool = Pool()
    try:
        body = {"model": one_p_one_d.facts.model, "prompt": [7] * 100_000, "max_tokens": 4}
        request = Request.json("/v1/completions", body)
        answer = await pool.fetch(Origin.parse(router.url), request, timeout_s=60)
    finally:
        await pool.close()

    assert answer.head.status == 400
    assert "context length" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_during_the_hand_off_leaves_no_kv_at_p(one_p_one_d, router):
    """Disconnects at several moments: afterwards P's KV use is back where it was, no turn is out.

    Engines count at their next step, so both are waited for together.
    """
    p0, picks = one_p_one_d.spec["p0"].url, random.Random(11)
    base = await settled_kv_usage(p0)
    for delay_s in (0.01, 0.1, 0.3, 0.6, 1.0):
        prompt = [picks.randrange(5, 4000) for _ in range(1200)]
        body = {"model": one_p_one_d.facts.model, "prompt": prompt, "max_tokens": 64,
                "stream": True, "ignore_eos": True}  # fmt: skip
        origin = Origin.parse(router.url)
        _, writer = await asyncio.open_connection(origin.host, origin.port)
        writer.write(Request.json("/v1/completions", body).render(origin))
        await asyncio.sleep(delay_s)
        writer.transport.abort()

    async def released():
        return await kv_usage(p0) <= base and router.services.metrics.in_flight.total() == 0

    assert await eventually(released, 30)


async def settled_kv_usage(url: str) -> float:
    """What is pinned for good; hand-offs of earlier tests get a lease to end."""

    async def unused():
        return await kv_usage(url) == 0.0

    await eventually(unused, 2 * LEASE_S)
    return await kv_usage(url)


async def eventually(holds, within_s: float) -> bool:
    for _ in range(int(within_s / POLL_S)):
        if await holds():
            return True
        await asyncio.sleep(POLL_S)
    return False


async def kv_usage(url: str) -> float:
    pool = Pool()
    try:
        answer = await pool.fetch(Origin.parse(url), Request("GET", "/metrics"), timeout_s=10)
    finally:
        await pool.close()
    line = next(x for x in answer.body.splitlines() if x.startswith(b"vllm:kv_cache_usage_perc"))
    return float(line.rpartition(b" ")[2])
