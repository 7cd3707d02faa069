"""Listens to the KV events of homes: vLLM's ZMQ publisher, where the cluster file names it.

One worker does, and tells the others through the board.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ppdbench.router.board import Board
from ppdbench.router.nodes import Upstream, Upstreams
from ppdbench.router.residency import NotKvEventsError, Residency, read_events

RECONNECT_MS = 200
RECONNECT_MAX_MS = 5_000
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
WAITING_MESSAGES = 10_000
_SEQUENCE_BYTES = 8
_SEQUENCE_LIMIT = 2**53
"""Exact in the board's float64."""

log = logging.getLogger("ppdbench.router")


class EventsOfNode:
    """Reads one home's messages and moves its mark: KV last used before it is gone.

    Batches are numbered. Where numbers are missing, or begin anew, removals were missed, so all
    that the node held is taken to be gone. The next number lies on the board: a worker that takes
    over from a dead one sees what was missed between them.
    """

    def __init__(self, node: Upstream, board: Board) -> None:
        self._node = node
        self._board = board
        self._residency: Residency | None = None
        self._nonsense = False

    def __repr__(self) -> str:
        return f"<EventsOfNode {self._node.name} {self._residency!r}>"

    def take(self, frames: Sequence[bytes], now_s: float) -> None:
        """One message. Nonsense is counted and said once; the next good one then shows a gap."""
        try:
            number, payload = _split(frames)
            events = read_events(payload)
        except NotKvEventsError as error:
            self._board.add("kv_events_bad")
            if not self._nonsense:
                log.warning("KV events of %s cannot be read, %s", self._node.name, error)
            self._nonsense = True
            self._node.kv_readable.put(0.0)
            return
        self._nonsense = False
        self._node.kv_readable.put(1.0)
        self._board.add("kv_events", len(events))
        expected = int(self._node.kv_next.get())
        self._node.kv_next.put(number + 1)
        gone_s = self._node.gone_s.get()
        if expected not in (0, number):
            self._board.add("kv_events_gaps")
            self._residency = None
            gone_s = now_s
        if self._residency is None:
            self._residency = Residency(now_s)
        self._node.gone_s.put(max(gone_s, self._residency.gone_by(events, now_s)))


def _split(frames: Sequence[bytes]) -> tuple[int, bytes]:
    if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
        raise NotKvEventsError("no message of topic, number and batch")
    number = int.from_bytes(frames[1], "big")
    if number >= _SEQUENCE_LIMIT:
        raise NotKvEventsError(f"batch number {number}")
    return number, frames[2]


class KvEvents:
    """Connections to every home that has an address; it is only ever connected to, never bound.

    ``clock_offset_s`` makes of monotonic time the time that turns are noted with, so that a step
    of the wall clock moves both or neither.
    """

    def __init__(self, upstreams: Upstreams, board: Board, clock_offset_s: float) -> None:
        self._clock_offset_s = clock_offset_s
        self._nodes = [node for node in upstreams.homes if node.node.kv_events]
        self._board = board

    def __repr__(self) -> str:
        return f"<KvEvents of {[node.name for node in self._nodes]}>"

    async def listen(self) -> None:
        """Until cancelled. A publisher that is not there is tried again for ever."""
        context = zmq.asyncio.Context()
        try:
            await asyncio.gather(*(self._listen_to(node, context) for node in self._nodes))
        finally:
            context.destroy(linger=0)

    async def _listen_to(self, node: Upstream, context: zmq.asyncio.Context) -> None:
        socket = _socket(context)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        node.kv_connected.put(0.0)
        node.kv_readable.put(0.0)
        try:
            socket.connect(str(node.node.kv_events))
        except zmq.ZMQError as error:
            self._board.add("kv_events_bad")
            log.warning(
                "KV events of %s: %s cannot be connected to, %s",
                node.name, node.node.kv_events, error,
            )  # fmt: skip
            return
        await asyncio.gather(self._read(node, socket), _watch(node, monitor))

    async def _read(self, node: Upstream, socket: zmq.asyncio.Socket) -> None:
        events = EventsOfNode(node, self._board)
        while True:
            frames = await socket.recv_multipart()
            events.take(frames, time.monotonic() + self._clock_offset_s)


def _socket(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    options = {
        zmq.LINGER: 0, zmq.IPV6: 1, zmq.RCVHWM: WAITING_MESSAGES,
        zmq.MAXMSGSIZE: MESSAGE_LIMIT_BYTES, zmq.RECONNECT_IVL: RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
    }  # fmt: skip
    for name, value in options.items():
        socket.setsockopt(name, value)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


async def _watch(node: Upstream, monitor: zmq.asyncio.Socket) -> None:
    """Keep ``kv_connected`` true, and say each change once."""
    said = None
    while True:
        change = await recv_monitor_message(monitor)
        connected = change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        node.kv_connected.put(float(connected))
        if connected != said:
            said = connected
            text = "are read" if connected else "are not there; evictions show in cached_tokens"
            log.warning("KV events of %s at %s %s", node.name, node.node.kv_events, text)
