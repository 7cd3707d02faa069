"""What a client of the router sees when real nodes die, stall, or are left: 2P_2D and 1P_1D."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time

import psutil
import pytest
from tests.live import machine
from tests.live.routed import (
    ask,
    body_of,
    eventually,
    fresh_prompt,
    metric,
    open_request,
    routing,
)

from ppdbench.cluster import control
from ppdbench.cluster.launch import LaunchOptions, answers, launch
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.topology import Topology
from ppdbench.router.config import Timeouts

LEASE_S = 12
"""As both clusters start their P; the shared one does too."""

LONG_TOKENS = 7000
"""P computes on them for seconds."""

AT_ONCE_S = 3.0


@pytest.fixture(scope="module")
def two_of_each(engine_python, tmp_path_factory):
    options = LaunchOptions(device=Device.CPU, lease_s=LEASE_S)
    with launch(Topology.parse("2P_2D"), options, tmp_path_factory.mktemp("two")) as cluster:
        yield cluster


@pytest.fixture
def nodes(two_of_each):
    """All four alive: what an earlier test killed is started again, alone, with its own command."""
    by_name = {command.spec.name: command for command in two_of_each.commands}
    for name in two_of_each.dead():
        started = two_of_each._guard.start(by_name[name], two_of_each.log_of(name))
        two_of_each._running[name] = started
    deadline = time.monotonic() + 120
    while not all(map(answers, two_of_each.nodes)):
        assert time.monotonic() < deadline, "a node did not come back"
        time.sleep(0.5)
    return {node.name: node for node in two_of_each.nodes}


def family(cluster, name):
    return machine.members({cluster.processes[name].pid})


def kill(cluster, name):
    for process in family(cluster, name):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def stopped(cluster, name):
    """Stopped for the block, and whatever of it still is there goes on afterwards."""
    processes = family(cluster, name)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def in_prefill(router, name):
    """The router waits for this P."""

    async def waits():
        return router.upstreams[name].prefill_tokens.total() > 0

    assert await eventually(waits, 20)


async def asked(router, name):
    """The router has sent this node a turn."""

    async def sent():
        return router.upstreams[name].requests.total() > 0

    assert await eventually(sent, 60)


async def holds_nothing(node, within_s):
    async def free():
        return await metric(node, "vllm:kv_cache_usage_perc") == 0.0

    return await eventually(free, within_s)


def tokens_alone(node, prompt, count):
    """What one engine, cold, says to it."""
    body = body_of(prompt, max_tokens=count, cache_salt=str(time.monotonic_ns()))
    return control.post(node, "/v1/completions", body, 120.0)["choices"][0]["token_ids"]


@pytest.mark.full
async def test_a_p_killed_in_mid_prefill_is_another_p_or_a_502_at_once(two_of_each, nodes):
    """Two routers see one death: that with another P retries once, the other says who broke."""
    prompt = fresh_prompt(LONG_TOKENS)
    async with (
        routing(nodes.values(), policy="remote") as many,
        routing([nodes["p0"], nodes["d0"]], policy="remote") as single,
    ):
        retried = asyncio.create_task(ask(many.url, prompt))
        refused = asyncio.create_task(ask(single.url, fresh_prompt(LONG_TOKENS)))
        await in_prefill(many, "p0")
        await in_prefill(single, "p0")
        await asyncio.sleep(0.1)
        assert not retried.done()
        assert not refused.done()
        kill(two_of_each, "p0")
        killed_at_s = time.monotonic()
        no = await refused
        after_s = time.monotonic() - killed_at_s
        yes = await retried
        retries = many.services.metrics.board.total("retries")

    print(f"502 {after_s:.2f} s after the kill")
    assert no.head.status == 502
    assert "p0" in no.json()["error"]["message"]
    assert after_s < AT_ONCE_S
    assert (yes.head.status, retries) == (200, 1)
    assert yes.json()["choices"][0]["token_ids"] == tokens_alone(nodes["d1"], prompt, 16)


@pytest.mark.full
async def test_a_p_that_stalls_is_a_504_and_keeps_nothing(two_of_each, nodes):
    """SIGSTOP: the phase's limit ends the turn; P goes on, holds no KV for it, serves the next."""
    limits = Timeouts(prefill_s=2.0)
    async with routing([nodes["p0"], nodes["d0"]], policy="remote", timeouts=limits) as router:
        with stopped(two_of_each, "p0"):
            begun_s = time.monotonic()
            answer = await ask(router.url, fresh_prompt(1200))
            after_s = time.monotonic() - begun_s
        again = await ask(router.url, fresh_prompt(100))
        free = await holds_nothing(nodes["p0"], LEASE_S + 10)

    print(f"504 after {after_s:.2f} s")
    assert answer.head.status == 504
    assert 2.0 <= after_s < 2.0 + AT_ONCE_S
    assert (again.head.status, free) == (200, True)


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
async def test_a_d_killed_before_its_first_byte_is_another_d(two_of_each, nodes, stream):
    """One retry, whole, with the tokens of one engine alone; P keeps neither hand-off."""
    prompt = fresh_prompt(600)
    async with routing(nodes.values(), policy="remote") as router:
        with stopped(two_of_each, "d0"):
            request = asyncio.create_task(ask(router.url, prompt, stream=stream))
            await asked(router, "d0")
            await asyncio.sleep(0.2)
            assert not request.done()
            assert await metric(nodes["p0"], "vllm:kv_cache_usage_perc") > 0
            kill(two_of_each, "d0")
        answer = await request
        retries = router.services.metrics.board.total("retries")
        free = [await holds_nothing(nodes[name], LEASE_S / 2) for name in ("p0", "p1")]

    assert (answer.head.status, answer.head.get(b"x-ppd-node"), retries) == (200, b"d1", 1)
    told = tokens_in(answer.body) if stream else answer.json()["choices"][0]["token_ids"]
    assert told == tokens_alone(nodes["d1"], prompt, 16)
    assert (b"[DONE]" in answer.body) == stream
    assert free == [True, True]


def events_in(raw):
    lines = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def tokens_in(raw):
    choices = [event["choices"][0] for event in events_in(raw) if event.get("choices")]
    return [token for choice in choices for token in choice.get("token_ids") or []]


@pytest.mark.full
async def test_a_d_killed_in_mid_stream_is_an_error_event_and_never_a_second_text(
    two_of_each, nodes
):
    """What was told is the beginning of the one text, then an error, then nothing."""
    prompt, count = fresh_prompt(300), 2000
    async with routing(nodes.values(), policy="remote") as router:
        reader, writer = await open_request(router.url, prompt, max_tokens=count, stream=True)
        raw = b""
        async with asyncio.timeout(60):
            while raw.count(b"data: ") < 20:
                raw += await reader.read(65536)
            assert router.upstreams["d0"].running.total() == 1
            kill(two_of_each, "d0")
            killed_at_s = time.monotonic()
            while b'"error"' not in raw and (more := await reader.read(65536)):
                raw += more
            after_s = time.monotonic() - killed_at_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                raw += await reader.read(65536)
        writer.close()
        elsewhere = router.upstreams["d1"].requests.total()
        left = router.services.metrics.in_flight.total()

    told = tokens_in(unchunked(raw))
    print(f"error event {after_s:.2f} s after the kill, {len(told)} tokens told")
    assert events_in(unchunked(raw))[-1]["error"]["code"] == 502
    assert b"[DONE]" not in raw
    assert 10 <= len(told) < count
    assert told == tokens_alone(nodes["d1"], prompt, len(told))
    assert (elsewhere, left) == (0, 0)


def unchunked(raw):
    """The body of a chunked answer, as far as it came."""
    body, rest = b"", raw.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size:
            break
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


async def test_a_client_that_leaves_cancels_the_leg_that_runs(one_p_one_d):
    """In P's leg P never finishes; in D's leg D stops long before the end. P then holds nothing."""
    p0, d0 = one_p_one_d.spec["p0"], one_p_one_d.spec["d0"]
    await holds_nothing(p0, 2 * LEASE_S)
    held = await metric(p0, "vllm:kv_cache_usage_perc")
    async with routing(one_p_one_d.nodes, policy="remote") as router:
        told = await metric(p0, "vllm:generation_tokens_total")
        _, writer = await open_request(router.url, fresh_prompt(LONG_TOKENS), stream=True)
        await busy(p0)
        writer.transport.abort()
        assert await idle(p0)
        in_p = await metric(p0, "vllm:generation_tokens_total") - told
        d_was_asked = router.upstreams["d0"].requests.total()

        told = await metric(d0, "vllm:generation_tokens_total")
        reader, writer = await open_request(
            router.url, fresh_prompt(300), max_tokens=6000, stream=True
        )
        raw = b""
        while raw.count(b"data: ") < 20:
            raw += await asyncio.wait_for(reader.read(65536), 60)
        writer.transport.abort()
        assert await idle(d0)
        in_d = await metric(d0, "vllm:generation_tokens_total") - told
        left = [router.services.metrics.in_flight.total(), router.upstreams["d0"].running.total()]

        async def released():
            return await metric(p0, "vllm:kv_cache_usage_perc") <= held

        assert await eventually(released, LEASE_S / 2)

    print(f"P told {in_p:.0f} tokens, D {in_d:.0f} of 6000")
    assert (in_p, d_was_asked) == (0, 0)
    assert 20 <= in_d < 3000
    assert left == [0, 0]


async def busy(node):
    async def runs():
        return await metric(node, "vllm:num_requests_running") > 0

    assert await eventually(runs, 20)


async def idle(node):
    async def rests():
        return await metric(node, "vllm:num_requests_running") == 0

    return await eventually(rests, 10)
