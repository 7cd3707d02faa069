"""One worker process: the port, the data path, the control path, and what runs beside them."""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self

from ppdbench.core.errors import PpdError
from ppdbench.http.server import Incoming, Responder, Server
from ppdbench.policy.base import Policy
from ppdbench.router.board import ArrivalRate
from ppdbench.router.choose import Chooser
from ppdbench.router.config import RouterConfig
from ppdbench.router.control import ControlPath
from ppdbench.router.health import Health
from ppdbench.router.metrics import Metrics
from ppdbench.router.nodes import Upstreams
from ppdbench.router.pages import make_application
from ppdbench.router.policies import Tables, check_policy, load_policy
from ppdbench.router.shared import LISTENER, Shared, clock_offset_s
from ppdbench.router.turns import JSON, RETRY_SOON, TEXT_FIELDS, Services, TurnInFlight
from ppdbench.router.wire import error_body

SWEEP_EVERY_S = 0.25
WATCH_TABLE_EVERY_S = 1.0
LAST_WORDS_S = 1.0
"""For the errors of turns that a drain did not wait for, and for the release of their blocks."""

log = logging.getLogger("ppdbench.router")
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes need no key."""


class Router:
    """Serves in the running loop. Use as an async context manager, then ``url``.

    ``tables`` are of when ``policy`` was read; without them it was read just now.
    """

    def __init__(
        self, config: RouterConfig, policy: Policy, shared: Shared, tables: Tables | None = None
    ) -> None:
        self.config = config
        self._shared = shared
        self.upstreams = Upstreams(config.cluster, shared.board)
        rate = ArrivalRate(shared.board)
        self._tables = Tables(config) if tables is None else tables
        chooser = Chooser(
            self.upstreams,
            policy,
            shared.memory,
            rate,
            self._tables.first_shadow(),
            config.count_tokens,
        )
        health = Health(self.upstreams, config.health)
        self.services = Services(
            config,
            chooser,
            health,
            Metrics(shared.board),
            shared.receipts,
            clock_offset_s(shared.board),
        )
        self._control = ControlPath(make_application(self.services, self.upstreams))
        self._server = Server(
            self._handle,
            host=config.host,
            port=config.port,
            max_body_bytes=config.max_body_bytes,
            reuse_port=config.workers > 1,
        )
        self._keys = tuple(key.encode() for key in config.client_keys)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self.draining = False

    def __repr__(self) -> str:
        return f"<Router {self.url} {self.upstreams!r}>"

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        self._distrust_other_clocks()
        await self._control.start()
        if self._tables.changed():  # one that replaces a dead worker decides as the others do
            await self.reload()
        await self._server.start()
        self._run_beside(self.services.health.watch())
        self._run_beside(self.services.health.resolve_doubts())
        self._run_beside(self._sweep())
        self._run_beside(self._watch_tables())
        if self._shared.worker == LISTENER and any(n.node.kv_events for n in self.upstreams.homes):
            # ZMQ and its thread only where somebody publishes.
            from ppdbench.router.kv_events import KvEvents

            offset_s = self.services.clock_offset_s
            self._run_beside(KvEvents(self.upstreams, self._shared.board, offset_s).listen())

    def _distrust_other_clocks(self) -> None:
        """A state file may be of another boot, and of a wall clock that was set back since.

        A mark that lies ahead would make all turns ``cold`` until then.
        """
        now_s = time.monotonic() + self.services.clock_offset_s
        for node in self.upstreams.all:
            node.progress_cell.put(0.0)
            for mark in (node.lost_s, node.gone_s):
                mark.put(min(mark.get(), now_s))

    async def close(self) -> None:
        """Stop at once; :meth:`drain` first for a friendly end."""
        for task in tuple(self._tasks):
            task.cancel()
        await self._server.close()
        await self._control.close()
        for pool in self.upstreams.pools.values():
            await pool.close()
        self._shared.receipts.close()

    async def drain(self) -> None:
        """Take no new turn and wait until every client has its answer, at most ``drain_s``.

        Turns that are still under way then end with an error that says so.
        """
        self.draining = True
        self._server.stop_listening()
        until_s = time.monotonic() + self.config.drain_s
        while self._server.busy and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for turn in tuple(self.services.turns):
            turn.give_up_to_end()
        until_s = time.monotonic() + LAST_WORDS_S
        releasing = self.services.releasing
        while (self._server.busy or releasing) and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _handle(self, incoming: Incoming, responder: Responder) -> None:
        if self._keys and incoming.path not in OPEN_PATHS and not self._may(incoming):
            _refuse_unknown(incoming, responder)
        elif incoming.method != "POST" or incoming.path not in TEXT_FIELDS:
            self._control.handle(incoming, responder)
        elif self.draining:
            _refuse(responder, 503, "the router is shutting down", "ServiceUnavailableError")
        elif self.services.metrics.in_flight.total() >= self.config.max_in_flight:
            self.services.metrics.outcome("refused")
            _refuse(responder, 429, "too many requests in flight", "RateLimitError")
        else:
            TurnInFlight(self.services, incoming, responder).begin()

    def _may(self, incoming: Incoming) -> bool:
        """Every key is compared, each in constant time. A browser's preflight can bring none."""
        if _is_preflight(incoming):
            return True
        scheme, _, given = (incoming.get(b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        """End turns whose phase takes too long."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.services.receipts.share()
            self.services.health.share_progress()
            self.services.metrics.follow(self.services.chooser.memory)
            now_s = time.monotonic()
            self._show_drift(now_s + self.services.clock_offset_s)
            for turn in [turn for turn in self.services.turns if turn.overdue(now_s)]:
                turn.give_up()

    def _show_drift(self, now_s: float) -> None:
        """Also when the alarm ends, or its table goes, and no turn comes."""
        drift = self.services.chooser.drift
        alarm = drift is not None and drift.alarm(now_s)
        self.services.metrics.board.put("drift_alarm", float(alarm))

    async def reload(self) -> None:
        """Take the table anew, whole or not at all; a bad file keeps the one in use.

        One after the other, so that the last to be asked for has read the newest file.
        """
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        board = self.services.metrics.board
        self._tables.changed()  # what is read now is no news to the watch
        try:
            policy = await asyncio.to_thread(load_policy, self.config)
            shadow = await asyncio.to_thread(self._tables.shadow)
            warnings = await check_policy(policy if shadow is None else shadow, self.config)
        except PpdError as error:
            board.add("reloads_failed")
            log.error("kept the table in use: %s", error)  # noqa: TRY400  (a sentence, no trace)
        else:
            self.services.chooser.use(policy, shadow)
            board.add("reloads")
            for warning in warnings:
                log.warning("%s", warning)
            log.warning("took the table anew: %s", policy.name)

    async def _watch_tables(self) -> None:
        while True:
            await asyncio.sleep(WATCH_TABLE_EVERY_S)
            if self._tables.changed():
                await self.reload()


def _refuse(responder: Responder, status: int, message: str, kind: str) -> None:
    headers = RETRY_SOON if status in (429, 503) else JSON
    responder.send(status, error_body(message, kind, status), headers)


def _is_preflight(incoming: Incoming) -> bool:
    """Another ``OPTIONS``, or one with a body, is no browser's."""
    asks = incoming.get(b"access-control-request-method") is not None
    return incoming.method == "OPTIONS" and asks and not incoming.body


def _refuse_unknown(incoming: Incoming, responder: Responder) -> None:
    if incoming.method == "HEAD":
        responder.send(401, b"")  # a body would be read as the next answer's beginning
    else:
        _refuse(responder, 401, "a valid API key is needed", "AuthenticationError")


async def serve_until_told(
    router: Router, ready: Callable[[str], None], parent: int | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. ``ready`` gets the URL once the port is open.

    A pipe ``parent`` that ends says the same.
    """
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    if parent is not None:

        def orphaned() -> None:
            loop.remove_reader(parent)
            told.set()

        loop.add_reader(parent, orphaned)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with router:
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(router.reload())
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        _settle_collector()
        ready(router.url)
        await told.wait()
        await router.drain()


def _settle_collector() -> None:
    """What is loaded now stays; turns leave no cycles worth looking for often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
