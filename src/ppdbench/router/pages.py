"""What the control path answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from importlib.resources import files
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from ppdbench.core.decision import Route
from ppdbench.core.topology import Role
from ppdbench.http.client import Exchange
from ppdbench.http.errors import ConnectError, HttpError
from ppdbench.http.messages import Head, Headers, Request, Response
from ppdbench.router.choose import Chooser
from ppdbench.router.documents import UnreadableError, without_hand_off
from ppdbench.router.metrics import HISTOGRAMS, OUTCOMES, PLAIN, REASONS, SECONDS
from ppdbench.router.nodes import Upstream, Upstreams
from ppdbench.router.turns import Services
from ppdbench.router.wire import error_body, request_lines, response_lines

DECISIONS_SHOWN = 100
NODES_OWN = ("/tokenize", "/detokenize", "/version")
"""What clients of vLLM ask for outside ``/v1``."""

PIECES_AHEAD = 16
"""Of an answer that passes through: at most 64 KiB each or so, as the kernel gives them."""

GAUGES = frozenset({"in_flight", "drift_alarm"})


def make_application(services: Services, upstreams: Upstreams) -> web.Application:
    """The aiohttp application of one worker."""
    pages = Pages(services, upstreams)
    application = web.Application(client_max_size=services.config.max_body_bytes)
    application.add_routes(
        [
            web.get("/health", pages.health),
            web.get("/ready", pages.ready),
            web.get("/metrics", pages.metrics),
            web.get("/v1/models", pages.models),
            web.get("/ppd/decisions", pages.decisions),
            web.get("/ppd/state", pages.state),
            web.get("/ui", pages.page),
            web.route("*", "/v1/{rest:.*}", pages.pass_through),
            *(web.route("*", path, pages.pass_through) for path in NODES_OWN),
        ]
    )
    return application


class Pages:
    """Handlers; each is a coroutine from a request to a response."""

    def __init__(self, services: Services, upstreams: Upstreams) -> None:
        self._services = services
        self._upstreams = upstreams
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_BoardCollector(services, upstreams))

    async def health(self, _: web.Request) -> web.Response:
        """This process lives."""
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """Turns can be served: an R is alive, or a P and another home."""
        alive = {node.role for node in self._upstreams.all if node.alive}
        ready = Role.R in alive or (Role.P in alive and bool(alive & {Role.D, Role.PD}))
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        self._services.metrics.follow(self._services.chooser.memory)
        return web.Response(
            body=generate_latest(self._registry),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def models(self, request: web.Request) -> web.Response:
        """From the first node that answers, so also with one down or hanging."""
        asked = [asyncio.ensure_future(self._ask(node, request)) for node in self._upstreams.all]
        try:
            for answering in asyncio.as_completed(asked):
                with suppress(HttpError):
                    answer = await answering
                    if answer.ok:
                        return _passed_on(answer)
        finally:
            for asking in asked:
                asking.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return _error(503, "no node answers /v1/models", "ServiceUnavailableError")

    async def decisions(self, request: web.Request) -> web.Response:
        """The newest receipts of all workers, the newest first."""
        try:
            limit = int(request.query.get("limit", DECISIONS_SHOWN))
        except ValueError:
            return _error(400, "limit must be a whole number", "BadRequestError")
        latest = self._services.receipts.latest(max(0, min(limit, 10_000)))
        return web.json_response({"decisions": latest})

    async def page(self, _: web.Request) -> web.Response:
        """Nodes and the latest decisions, for a person."""
        text = files("ppdbench.router").joinpath("ui.html").read_text(encoding="utf-8")
        return web.Response(text=text, content_type="text/html")

    async def state(self, _: web.Request) -> web.Response:
        """Nodes and what is remembered."""
        services = self._services
        services.metrics.follow(services.chooser.memory)
        return web.json_response(
            {
                "policy": services.chooser.policy.name,
                "table_digest": _table_digest(services.chooser),
                "in_flight": int(services.metrics.board.total("in_flight")),
                "nodes": [_node(node) for node in self._upstreams.all],
                "memory": {
                    "capacity": services.chooser.memory.capacity,
                    "used": services.chooser.memory.used(),
                    "evicted": int(services.metrics.board.total("evicted")),
                },
            }
        )

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """What is no turn goes to a node that can do everything alone; the cap holds for it too."""
        in_flight = self._services.metrics.in_flight
        if in_flight.total() >= self._services.config.max_in_flight:
            self._services.metrics.outcome("refused")
            refusal = _error(429, "too many requests in flight", "RateLimitError")
            refusal.headers["retry-after"] = "1"
            return refusal
        in_flight.add()
        try:
            return await self._passed_through(request)
        finally:
            in_flight.add(-1)

    async def _passed_through(self, request: web.Request) -> web.StreamResponse:
        """It must steer no hand-off. Where nobody listens nothing was sent: the next is asked."""
        if request.method == "TRACE" or ".." in request.path.split("/"):
            return _error(404, "no node is asked this", "NotFoundError")
        try:
            body = without_hand_off(await request.read())
        except UnreadableError as error:
            return _error(400, str(error), "BadRequestError")
        alone = [node for node in self._upstreams.homes if node.alive]
        alone.sort(key=lambda node: (not node.role.needs_prefill_node, node.running.total()))
        for node in alone:
            try:
                return await self._passed_to(node, request, body)
            except ConnectError as error:
                self._services.health.failed(node, error)
        return _error(501, f"{request.path} needs a living R, D or pD node", "NotImplemented")

    async def _passed_to(
        self, node: Upstream, request: web.Request, body: bytes
    ) -> web.StreamResponse:
        """The node's answer.

        Raises:
            ConnectError: there is nobody.
        """
        relay = Relay()
        timeouts = self._services.config.timeouts
        exchange = relay.exchange = node.pool.start(
            node.origin, self._request(node, request, body), relay
        )
        try:
            async with asyncio.timeout(timeouts.first_byte_s):
                head = await relay.head
            return await _relayed(request, head, relay, timeouts.silence_s)
        except TimeoutError:
            return _error(504, f"{node.name} gave no answer in time", "TimeoutError")
        except ConnectError:
            raise
        except HttpError as error:
            return _error(502, f"{node.name}: {error}", "BadGatewayError")
        finally:
            exchange.cancel()

    async def _ask(self, node: Upstream, request: web.Request) -> Response:
        """Always a GET, also for a HEAD, which vLLM refuses."""
        return await node.pool.fetch(
            node.origin,
            self._request(node, request.clone(method="GET"), b""),
            timeout_s=self._services.config.timeouts.first_byte_s,
        )

    def _request(self, node: Upstream, request: web.Request, body: bytes) -> Request:
        raw = tuple((name.lower(), value) for name, value in request.raw_headers)
        keep = self._services.keep_authorization
        headers = _pairs(request_lines(raw, keep_authorization=keep))
        # OPTIONS may come from anyone, so it must not get by the node's key what only that opens.
        key = () if request.method == "OPTIONS" else node.authorization_pair
        return Request(request.method, request.raw_path, key + headers, body)


class Relay:
    """A node's answer as it comes: ``head``, then its pieces by ``async for``.

    The node is not read further while ``PIECES_AHEAD`` wait: a slow client slows it down.
    """

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[bytes | HttpError] = asyncio.Queue()

    def on_head(self, head: Head, at_s: float) -> None:  # noqa: ARG002
        if not self.head.done():
            self.head.set_result(head)

    def on_body(self, data: bytes, at_s: float) -> None:  # noqa: ARG002
        self._pieces.put_nowait(data)
        if self.exchange is not None and self._pieces.qsize() >= PIECES_AHEAD:
            self.exchange.pause()

    def on_end(self, at_s: float) -> None:  # noqa: ARG002
        self._pieces.put_nowait(b"")

    def on_failure(self, error: HttpError, at_s: float) -> None:  # noqa: ARG002
        self._pieces.put_nowait(error)
        if not self.head.done():
            self.head.set_exception(error)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self._pieces.get():
            if self.exchange is not None and self._pieces.empty():
                self.exchange.resume()
            if isinstance(piece, HttpError):
                raise piece
            yield piece


async def _relayed(
    request: web.Request, head: Head, relay: Relay, silence_s: float
) -> web.StreamResponse:
    """Piece by piece, so that a stream stays one; one that breaks off ends without its end.

    So does one that stalls, at the node or at the client, for longer than ``silence_s``.
    """
    if request.method == "HEAD":
        return web.Response(status=head.status, headers=_headers(head))
    answer = web.StreamResponse(status=head.status, headers=_headers(head))
    await answer.prepare(request)
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(silence_s) as silence:
            async for piece in relay:
                await answer.write(piece)
                silence.reschedule(clock() + silence_s)
    except (HttpError, TimeoutError):
        assert request.transport is not None
        request.transport.abort()
    else:
        await answer.write_eof()
    return answer


def _passed_on(answer: Response) -> web.Response:
    return web.Response(status=answer.head.status, body=answer.body, headers=_headers(answer.head))


def _headers(head: Head) -> list[tuple[str, str]]:
    pairs = _pairs(response_lines(head))
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]


def _pairs(lines: bytes) -> Headers:
    split = (line.partition(b": ") for line in lines.split(b"\r\n")[:-1])
    return tuple((name, value) for name, _, value in split)


def _error(status: int, message: str, kind: str) -> web.Response:
    return web.Response(
        status=status, body=error_body(message, kind, status), content_type="application/json"
    )


def _table_digest(chooser: Chooser) -> str | None:
    """Of the table that routes, or that is asked in the shadow."""
    for policy in (chooser.policy, chooser.shadow):
        table = getattr(policy, "table", None)
        if table is not None:
            return str(table.digest)
    return None


def _node(node: Upstream) -> dict[str, Any]:
    return {
        "name": node.name,
        "role": node.role.value,
        "url": node.node.url,
        "alive": node.alive,
        "running": int(node.running.total()),
        "prefill_tokens": int(node.prefill_tokens.total()),
        "epoch": node.epoch,
    }


class _BoardCollector:
    """Prometheus families read from the board at the scrape, summed over the workers."""

    def __init__(self, services: Services, upstreams: Upstreams) -> None:
        self._services = services
        self._upstreams = upstreams

    def collect(self) -> Iterable[Metric]:
        yield from self._plain()
        yield self._routes()
        yield self._outcomes()
        yield from self._nodes()
        yield from map(self._histogram, HISTOGRAMS)

    def _plain(self) -> Iterator[Metric]:
        board = self._services.metrics.board
        for name in PLAIN:
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(f"ppd_{name}", f"ppd {name}", value=board.total(name))

    def _routes(self) -> Metric:
        board = self._services.metrics.board
        family = CounterMetricFamily("ppd_turns", "Turns by decision", labels=["route", "reason"])
        for route in Route:
            for reason in REASONS:
                count = board.total(f"route:{route}:{reason}")
                if count:
                    family.add_metric([route.value, reason], count)
        return family

    def _outcomes(self) -> Metric:
        board = self._services.metrics.board
        family = CounterMetricFamily("ppd_outcomes", "How turns ended", labels=["outcome"])
        for outcome in OUTCOMES:
            family.add_metric([outcome], board.total(f"outcome:{outcome}"))
        return family

    def _nodes(self) -> Iterator[Metric]:
        for what in ("running", "prefill_tokens", "requests", "failures"):
            kind = CounterMetricFamily if what in ("requests", "failures") else GaugeMetricFamily
            family = kind(f"ppd_node_{what}", f"{what} by node", labels=["node"])
            for node in self._upstreams.all:
                family.add_metric([node.name], getattr(node, what).total())
            yield family
        alive = GaugeMetricFamily("ppd_node_alive", "As this worker sees it", labels=["node"])
        for node in self._upstreams.all:
            alive.add_metric([node.name], float(node.alive))
        yield alive
        yield self._kv_events()

    def _kv_events(self) -> Metric:
        text = "KV events of the node are being read"
        family = GaugeMetricFamily("ppd_node_kv_events_connected", text, labels=["node"])
        for node in self._upstreams.homes:
            if node.node.kv_events:
                family.add_metric([node.name], node.kv_connected.get())
        return family

    def _histogram(self, name: str) -> Metric:
        board = self._services.metrics.board
        total, buckets = 0.0, []
        for at, limit in enumerate((*map(str, SECONDS), "+Inf")):
            total += board.total(f"{name}:{at}")
            buckets.append((limit, total))
        family = HistogramMetricFamily(f"ppd_{name.removesuffix('_s')}_seconds", f"{name}")
        family.add_metric([], buckets=buckets, sum_value=board.total(f"{name}:sum"))
        return family
