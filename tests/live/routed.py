"""The running router before real nodes, and a client that speaks in token ids."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.http.client import Pool
from ppdbench.http.messages import Origin, Request
from ppdbench.router.config import RouterConfig
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer
from ppdbench.router.worker import Router

POLL_S = 0.1


@asynccontextmanager
async def routing(nodes, policy="local", **options):
    """A router over ``nodes``, serving in this loop."""
    config = RouterConfig(cluster=ClusterSpec(tuple(nodes)), policy=policy, port=0, **options)
    shared = Shared.over(make_buffer(config), config, 0)
    async with Router(config, load_policy(config), shared) as router:
        yield router


def fresh_prompt(tokens):
    """Token ids that no cache has seen."""
    picks = random.SystemRandom()
    return [picks.randrange(5, 4000) for _ in range(tokens)]


def body_of(prompt, **fields):
    return {
        "model": "tiny-llama", "prompt": prompt, "max_tokens": 16, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    } | fields  # fmt: skip


async def ask(url, prompt, **fields):
    """One answer, whole."""
    pool = Pool()
    try:
        request = Request.json("/v1/completions", body_of(prompt, **fields))
        return await pool.fetch(Origin.parse(url), request, timeout_s=120)
    finally:
        await pool.close()


async def open_request(url, prompt, **fields):
    """Send it and read nothing yet; the two ends of the connection."""
    origin = Origin.parse(url)
    reader, writer = await asyncio.open_connection(origin.host, origin.port)
    writer.write(Request.json("/v1/completions", body_of(prompt, **fields)).render(origin))
    await writer.drain()
    return reader, writer


async def eventually(holds, within_s):
    """Whether ``holds`` (a coroutine function) became true."""
    try:
        async with asyncio.timeout(within_s):
            while not await holds():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    return True


async def fetch(node, method, path):
    """The node's whole answer, over a connection of its own."""
    pool = Pool()
    try:
        return await pool.fetch(Origin.parse(node.url), Request(method, path), timeout_s=30)
    finally:
        await pool.close()


async def metric(node, name):
    """The sum of a metric's series whose line begins with ``name``."""
    lines = (await fetch(node, "GET", "/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
