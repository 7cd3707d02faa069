"""Which nodes are in. Broken connections count at once; beside them ``/health`` is asked."""

from __future__ import annotations

import asyncio
import logging
import re
import time

from ppdbench.http.errors import ConnectError, HttpError, OutOfFilesError
from ppdbench.http.messages import Origin, Request
from ppdbench.router.config import HealthRule
from ppdbench.router.memory import MOST_EPOCH
from ppdbench.router.nodes import Upstream, Upstreams

log = logging.getLogger("ppdbench.router")
_START_TIME = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})?\s+([0-9.e+]+)", re.MULTILINE)
ROUNDS_PER_EPOCH_CHECK = 6
DOUBT_EVERY_S = 1.0
"""A node that gives cause for doubt with every turn is not asked more often."""


class Health:
    """Judges nodes for one worker; nobody else changes ``alive`` and ``strikes``."""

    def __init__(self, upstreams: Upstreams, rule: HealthRule) -> None:
        self._upstreams = upstreams
        self._rule = rule
        self._doubted: set[int] = set()
        self._doubt = asyncio.Event()

    def failed(self, node: Upstream, error: HttpError) -> None:
        """A turn broke at ``node``. A refused connection means that nobody is there.

        That we are out of files means nothing of it.
        """
        if isinstance(error, OutOfFilesError):
            return
        node.failures.add()
        self.doubt(node)
        count = self._rule.down_after if isinstance(error, ConnectError) else 1
        self._strike(node, count, str(error))

    def doubt(self, node: Upstream) -> None:
        """A lost turn or a broken connection: ``node`` may be another process by now."""
        self._doubted.add(node.index)
        self._doubt.set()

    async def resolve_doubts(self) -> None:
        """Ask doubted nodes when they were started, for ever."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            doubted, self._doubted = self._doubted, set()
            await asyncio.gather(*(self._resolve(self._upstreams.all[at]) for at in doubted))
            await asyncio.sleep(DOUBT_EVERY_S)

    async def _resolve(self, node: Upstream) -> None:
        """A node that has no answer yet may be starting; a dead one is asked when it is back."""
        if not await self._renew(node) and node.alive:
            self.doubt(node)

    def answered(self, node: Upstream, at_s: float) -> None:
        """``node`` sent bytes, so it lives, however slowly it answers ``/health``."""
        node.progress_at_s = at_s
        if node.alive:
            node.strikes = 0

    def share_progress(self) -> None:
        """Tell the other workers of nodes that sent bytes to this one."""
        for node in self._upstreams.all:
            if node.progress_at_s > node.progress_cell.get():
                node.progress_cell.put(node.progress_at_s)

    async def watch(self) -> None:
        """Ask every node for ever."""
        rounds = 0
        while True:
            check = rounds % ROUNDS_PER_EPOCH_CHECK == 0
            nodes = self._upstreams.all
            await asyncio.gather(*(self.ask(node, check_epoch=check) for node in nodes))
            await asyncio.sleep(self._rule.every_s)
            rounds += 1

    async def ask(self, node: Upstream, *, check_epoch: bool = False) -> None:
        """One round for one node."""
        asked_at_s = time.monotonic()
        request = Request("GET", "/health", node.authorization_pair)
        try:
            answer = await node.pool.fetch(node.origin, request, timeout_s=self._rule.timeout_s)
        except OutOfFilesError:
            return
        except HttpError as error:
            progress_at_s = max(node.progress_at_s, node.progress_cell.get())
            busy = progress_at_s >= asked_at_s and not isinstance(error, ConnectError)
            if not busy:
                self._strike(node, 1, str(error))
            return
        if not answer.ok:
            self._strike(node, 1, f"/health answers {answer.head.status}")
        elif self._good(node) or check_epoch:
            await self._renew(node)

    def _strike(self, node: Upstream, count: int, cause: str) -> None:
        if not node.alive:
            node.strikes = 0
            return
        node.strikes += count
        if node.strikes >= self._rule.down_after:
            node.alive = False
            node.strikes = 0
            log.warning("%s is out: %s", node.name, cause)

    def _good(self, node: Upstream) -> bool:
        """Whether this good answer brought a dead node back."""
        if node.alive:
            node.strikes = 0
            return False
        node.strikes += 1
        if node.strikes < self._rule.up_after:
            return False
        node.alive = True
        node.strikes = 0
        log.warning("%s is back", node.name)
        node.epoch_cell.put(node.epoch + 1)
        return True

    async def _renew(self, node: Upstream) -> bool:
        """Take the process's start time for its epoch, where the node tells it; if it answered."""
        request = Request("GET", "", node.authorization_pair)  # the URL has the path
        try:
            answer = await node.pool.fetch(
                Origin.parse(node.node.metrics_url), request, timeout_s=self._rule.timeout_s
            )
        except HttpError:
            return False
        started_s = _start_time_in(answer.body)
        if started_s is not None:
            node.epoch_cell.put(started_s)
        return True


def _start_time_in(metrics: bytes) -> int | None:
    """Of a process; ``None`` where nothing that can be one is told."""
    match = _START_TIME.search(metrics)
    try:
        started_s = 0.0 if match is None else float(match[1])
    except ValueError:
        return None
    return int(started_s) if 1 <= started_s < MOST_EPOCH else None
