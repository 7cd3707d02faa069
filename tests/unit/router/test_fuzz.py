"""Whatever a client or a node sends: no 500 of our own, no hang, no crash."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Coroutine
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppdbench.cluster.contract import cluster_from_options
from ppdbench.http.client import Pool
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Origin, Request
from ppdbench.router.config import HealthRule, RouterConfig, Timeouts
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer
from ppdbench.router.worker import Router
from ppdbench.testing import FakeEngine

ANSWER_LIMIT_S = 30.0
CALM = HealthRule(every_s=3600.0, down_after=10**9)
QUICK, FULL = 150, 3400
COUNTS = [
    pytest.param(QUICK, id="quick"),
    pytest.param(FULL, id="full", marks=pytest.mark.full),
]
"""Three tests of 3,400 cases make the 10,000 of a full run."""


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return "".join(traceback.format_exception(error)) if error else str(context)


class Rig:
    """Routers in a loop of their own: before engines that refuse as vLLM does, and before bytes."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.crashes: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.crashes.append(_told(context)))
        self.answer = b""
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def _start(self) -> None:
        self.raw = await asyncio.start_server(self._say, "127.0.0.1", 0)
        self.engines = [FakeEngine(max_model_len=1024, keep_log=False) for _ in range(2)]
        for engine in self.engines:
            await engine.start()
        raw_url = f"http://127.0.0.1:{self.raw.sockets[0].getsockname()[1]}"
        good = self._router([f"{role}={e.url}" for role, e in zip("PD", self.engines, strict=True)])
        again_url = raw_url.replace("127.0.0.1", "localhost")  # two nodes do not share a URL
        handed = self._router([f"P={raw_url}", f"D={again_url}"])
        self.routers = [good, self._router([f"R={raw_url}"]), handed]
        for router in self.routers:
            await router.start()
        self.pool = Pool()

    def _router(self, nodes: list[str]) -> Router:
        config = RouterConfig(
            cluster=cluster_from_options(nodes),
            policy="local",
            port=0,
            health=CALM,
            timeouts=Timeouts(prefill_s=1.0, first_byte_s=0.3, silence_s=0.3),
        )
        return Router(config, load_policy(config), Shared.over(make_buffer(config), config, 0))

    async def _say(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            await writer.drain()
        writer.close()

    async def post(self, body: bytes, headers=(), at: int = 0, path="/v1/chat/completions") -> int:
        origin = Origin.parse(self.routers[at].url)
        request = Request("POST", path, headers, body)
        return (await self.pool.fetch(origin, request, timeout_s=ANSWER_LIMIT_S)).head.status

    async def send_raw(self, wire: bytes) -> bytes:
        """Everything the router answers until it closes or is silent."""
        origin = Origin.parse(self.routers[0].url)
        reader, writer = await asyncio.open_connection(origin.host, origin.port)
        writer.write(wire)
        writer.write_eof()
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await reader.read()
        finally:
            writer.close()

    async def settled(self) -> bool:
        """Nothing is in flight any more."""
        async with asyncio.timeout(ANSWER_LIMIT_S):
            while any(router.services.turns for router in self.routers):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return all(r.services.metrics.in_flight.total() == 0 for r in self.routers)

    def close(self) -> None:
        async def stop() -> None:
            self.raw.close()
            await self.pool.close()
            for router in self.routers:
                await router.close()
            for engine in self.engines:
                await engine.close()
            await asyncio.sleep(0.01)

        self.run(stop())
        self.loop.close()


@pytest.fixture(scope="module")
def rig():
    rig = Rig()
    yield rig
    rig.close()


def many(count: int):
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, deadline=None, suppress_health_check=slow, database=None)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]) | scalars,
            "content": st.text(max_size=40) | anything,
        },
        optional={"tool_calls": anything, "name": scalars},
    ),
    max_size=6,
)
names = st.sampled_from(
    ["model", "stream", "stream_options", "max_tokens", "n", "user", "tools", "prompt_cache_key",
     "kv_transfer_params", "ignore_eos", "min_tokens", "cache_salt", "echo", "prompt_logprobs",
     "max_completion_tokens", "best_of", "return_token_ids"]
)  # fmt: skip
bodies = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries({"messages": messages | anything})
    | st.fixed_dictionaries({"prompt": st.lists(st.integers(0, 50), max_size=80) | anything}),
    st.dictionaries(names, anything | st.booleans() | st.integers(0, 5), max_size=5),
)
tokens = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
headers = st.lists(
    st.tuples(
        tokens.map(lambda t: t.lower().encode()),
        st.binary(max_size=20).filter(lambda b: not any(c in b for c in b"\r\n\0")),
    ).filter(lambda h: h[0] not in (b"content-length", b"transfer-encoding", b"host")),
    max_size=4,
)


@pytest.mark.parametrize("count", COUNTS)
def test_any_body_and_headers_get_an_answer(rig, count):
    """The node's answer or our refusal, but never a 500 or a silence."""

    @many(count)
    @given(bodies, headers, st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
    def check(body, extra, path):
        status = rig.run(rig.post(orjson.dumps(body), tuple(extra), path=path))
        assert status != 500
        assert rig.run(rig.settled())
        assert not rig.crashes, rig.crashes.pop()

    check()


VALID = Request.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
WIRE = VALID.render(Origin("http", "h", 1))


@pytest.mark.parametrize("count", COUNTS)
def test_any_bytes_on_the_port_end(rig, count):
    """Cut, changed, repeated or foreign bytes: an answer or a closed connection, in time."""

    @many(count)
    @given(
        st.integers(0, len(WIRE)),
        st.integers(0, len(WIRE)),
        st.binary(max_size=30),
        st.sampled_from([b"", WIRE, b"GET /metrics HTTP/1.1\r\n\r\n"]),
    )
    def check(start, end, middle, tail):
        raw = rig.run(rig.send_raw(WIRE[:start] + middle + WIRE[end:] + tail))
        assert b"HTTP/1.1 500" not in raw
        assert rig.run(rig.settled())
        assert not rig.crashes, rig.crashes.pop()

    check()


heads = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n",
        b"HTTP/1.1 503 Busy\r\n",
        b"HTTP/1.1 204 None\r\n",
        b"HTTP/1.0 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n",
        b"",
    ]
)
framings = st.sampled_from(
    [b"content-length: 5\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n", b"\r\n"]
)
usages = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": scalars,
        "completion_tokens": scalars,
        "prompt_tokens_details": st.dictionaries(st.just("cached_tokens"), scalars) | anything,
    },
)
answers = st.fixed_dictionaries(
    {"kv_transfer_params": st.just({"do_remote_prefill": True}) | anything, "usage": usages},
    optional={"choices": st.lists(st.fixed_dictionaries({"text": scalars, "token_ids": anything}))},
).map(orjson.dumps)
contents = st.one_of(
    st.binary(max_size=60),
    anything.map(orjson.dumps),
    anything.map(lambda value: b"data: " + orjson.dumps(value) + b"\n\n"),
    st.dictionaries(st.sampled_from(["choices", "usage", "kv_transfer_params"]), anything).map(
        lambda value: b"data: " + orjson.dumps(value) + b"\n\ndata: [DONE]\n\n"
    ),
    st.binary(max_size=40).map(lambda raw: b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw)),
)
broken = st.tuples(heads, framings, contents).map(b"".join)


@st.composite
def wholes(draw):
    """HTTP as it should be, with odd JSON in it."""
    body = draw(answers)
    kind = draw(st.sampled_from([b"application/json", b"text/event-stream"]))
    if kind != b"application/json":
        body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


@pytest.mark.parametrize("count", COUNTS)
def test_any_answer_of_a_node_is_survived(rig, count):
    """Bytes that are no HTTP, odd JSON, cut streams: a node's 5xx, a 502 or a cut; no 500."""

    @many(count)
    @given(wholes() | broken, st.booleans(), st.sampled_from([1, 2]))
    def check(answer, stream, at):
        rig.answer = answer
        body = orjson.dumps({"prompt": [1, 2, 3], "stream": stream})
        try:
            status = rig.run(rig.post(body, at=at, path="/v1/completions"))
        except HttpError as error:
            assert error.got_bytes or "closed" in str(error)  # noqa: PT017
        else:
            assert status != 500
        assert rig.run(rig.settled())
        assert not rig.crashes, rig.crashes.pop()

    check()
