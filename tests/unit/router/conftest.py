"""A router in front of fake engines, in this process and loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest

from ppdbench.cluster.contract import ClusterSpec, cluster_from_options
from ppdbench.http.client import Pool
from ppdbench.http.messages import Head, Origin, Request
from ppdbench.router.config import RouterConfig
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer
from ppdbench.router.worker import Router
from ppdbench.testing.fake import FakeEngine


@dataclass
class Reply:
    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def route(self) -> str:
        return self.header("x-ppd-route")

    @property
    def reason(self) -> str:
        return self.header("x-ppd-reason")

    @property
    def node(self) -> str:
        return self.header("x-ppd-node")

    def header(self, name: str) -> str:
        return (self.head.get(name.encode()) or b"").decode()

    def json(self) -> Any:
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return [orjson.loads(line) for line in lines if line != b"[DONE]"]

    def text(self) -> str:
        """The answer's text, streamed or not."""
        if (self.head.get(b"content-type") or b"").startswith(b"text/event-stream"):
            return "".join(_piece(e["choices"][0]) for e in self.events() if e.get("choices"))
        return _piece(self.json()["choices"][0])


def _piece(choice: dict[str, Any]) -> str:
    inner = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    return inner.get("content") or ""


@dataclass
class Bench:
    """``engines`` by node name, the router before them, and a client."""

    router: Router
    engines: dict[str, FakeEngine]
    pool: Pool
    model: str = "fake"
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    @property
    def origin(self) -> Origin:
        return Origin.parse(self.router.url)

    async def post(self, path: str, document: object, **headers: str) -> Reply:
        pairs = tuple((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items())
        answer = await self.pool.fetch(
            self.origin, Request.json(path, document, (*self.headers, *pairs)), timeout_s=20
        )
        return Reply(answer.head, answer.body)

    async def get(self, path: str) -> Reply:
        answer = await self.pool.fetch(self.origin, Request("GET", path), timeout_s=20)
        return Reply(answer.head, answer.body)

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Reply:
        headers = fields.pop("headers", {})
        body = {"model": self.model, "messages": messages, "max_tokens": 8} | fields
        return await self.post("/v1/chat/completions", body, **headers)

    def total(self, name: str) -> float:
        return self.router.services.metrics.board.total(name)


@pytest.fixture
async def bench_for():
    """Start ``bench_for("1P_2D", policy="local")``; closes all at the end."""
    async with AsyncExitStack() as stack:

        async def start(
            topology: str = "1P_1D",
            policy: str = "local",
            engine: Callable[[str], dict[str, Any]] = lambda _: {},
            kv_events: str | None = None,
            **options: Any,
        ) -> Bench:
            from ppdbench.core.topology import Topology

            nodes = Topology.parse(topology).nodes
            engines = {}
            for node in nodes:
                engines[node.name] = await stack.enter_async_context(
                    FakeEngine(**engine(node.name))
                )
            cluster = cluster_from_options(f"{n.role}={engines[n.name].url}" for n in nodes)
            cluster = ClusterSpec(tuple(replace(n, kv_events=kv_events) for n in cluster.nodes))
            config = RouterConfig(cluster=cluster, policy=policy, port=0, max_notes=1024, **options)
            shared = Shared.over(make_buffer(config), config, 0)
            router = Router(config, load_policy(config), shared)
            await stack.enter_async_context(router)
            pool = Pool()
            stack.push_async_callback(pool.close)
            return Bench(router, engines, pool)

        yield start
