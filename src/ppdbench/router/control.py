"""The control path on aiohttp: models, health, metrics, decisions, and what passes through.

The data path owns the port. A control request is played to aiohttp's own protocol through an
in-memory transport, so both live on one port and nothing else listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ppdbench.http.server import MAX_HEAD_BYTES, Incoming, Responder

SHUTDOWN_S = 1.0
"""A router that closes has drained before."""

log = logging.getLogger("ppdbench.router.control")


class ReplayTransport(asyncio.Transport):
    """Takes what aiohttp writes and gives it to the client; closing it ends the answer.

    A client that reads slowly pauses ``protocol``.
    """

    def __init__(self, responder: Responder, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._responder = responder
        self._protocol = protocol
        self._closed = False
        self._lost = False
        self._paused = False
        responder.on_writable = self._go_on
        responder.on_gone = self._lose

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._responder.pass_on(bytes(data))
        if self._responder.congested and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._protocol.resume_writing()

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._responder.hang_up()
            asyncio.get_running_loop().call_soon(self._lose)

    def _lose(self) -> None:
        """Tell the protocol once, as every transport does, or aiohttp keeps it for ever."""
        if not self._lost:
            self._lost = self._closed = True
            self._protocol.connection_lost(None)

    def abort(self) -> None:
        self.close()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401, ARG002
        return default


class ControlPath:
    """An aiohttp application behind :meth:`handle`."""

    def __init__(self, application: web.Application) -> None:
        log.addFilter(_is_ours)
        self._runner = web.AppRunner(
            application,
            logger=log,
            access_log=None,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEAD_BYTES,  # the server counted them all before
            keepalive_timeout=0.0,
            auto_decompress=False,  # what passes to a node passes as it is
            handler_cancellation=True,  # a client that leaves ends what runs for it
            shutdown_timeout=SHUTDOWN_S,
        )
        self._make: Callable[[], asyncio.Protocol] | None = None

    async def start(self) -> None:
        await self._runner.setup()
        self._make = self._runner.server

    async def close(self) -> None:
        await self._runner.cleanup()

    def handle(self, incoming: Incoming, responder: Responder) -> None:
        """Answer one request; its connection is closed afterwards."""
        assert self._make is not None
        protocol = self._make()
        transport = ReplayTransport(responder, protocol)
        protocol.connection_made(transport)
        protocol.data_received(_rendered(incoming, chunked=responder.chunked))


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a record is no client's fault; those come at any rate, and quote what was sent."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _rendered(incoming: Incoming, *, chunked: bool) -> bytes:
    """The request again, its body whole, asking for the connection to be closed.

    Not ``chunked`` it is HTTP/1.0, so that its answer has no chunks and it needs no ``Host``.
    """
    version = "1.1" if chunked else "1.0"
    drop = (b"connection", b"transfer-encoding", b"content-length", b"expect", b"upgrade")
    lines = [f"{incoming.method} {incoming.target} HTTP/{version}".encode("latin-1")]
    lines += [name + b": " + value for name, value in incoming.headers if name not in drop]
    if all(name != b"host" for name, _ in incoming.headers):
        lines.append(b"host: ppd")  # as for turns: nobody here looks at it
    lines += [b"connection: close", b"content-length: %d" % len(incoming.body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + incoming.body
