"""HTTP/1.1 server shell on ``asyncio.Protocol`` and httptools: a handler per request, no framework.

Requests on one connection are answered one after the other. A handler gets the whole request and a
:class:`Responder`, which it may keep and use later; nothing needs to be awaited.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Self, cast
from urllib.parse import unquote

import httptools
import orjson
from msgspec import Struct

from ppdbench.core.errors import EngineError
from ppdbench.http.keepalive import probe_peer
from ppdbench.http.messages import JSON_TYPE, Headers, Origin

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
READ_LIMIT_S = 60.0
"""The longest silence in the middle of a request, before it is 408."""

CLIENT_IDLE_LIMIT_S = 180.0
"""The longest silence between requests: longer than proxies and clients keep theirs."""

CHECKS_PER_LIMIT = 12
MAX_PIPELINED = 32
"""Requests that may wait on one connection before its bytes are left in the kernel."""

MAX_PIECES = 1024
"""Of a body, until they are joined: an object for every chunk of two bytes is 20 times its size."""

_OF_AN_UPGRADE = frozenset({b"upgrade", b"connection", b"http2-settings"})
_LAST_CHUNK = b"0\r\n\r\n"


class Incoming(Struct, eq=False):
    """A whole request. ``target`` has its query string; header names are lower-case.

    ``path`` is what a server would see: escapes are characters there. No key and no prompt is in
    its ``repr``, so none comes into a log.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    received_at_s: float
    path: str = ""

    def __post_init__(self) -> None:
        if self.target[:1] != "/":
            self.target = _origin_form(self.target)
        path = self.target.partition("?")[0].partition("#")[0]
        self.path = unquote(path) if "%" in path else path

    def __repr__(self) -> str:
        return f"<Incoming {self.method} {self.target}>"

    def get(self, name: bytes) -> bytes | None:
        """The first header called ``name``, which is lower-case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def _origin_form(target: str) -> str:
    """``http://host/path``, as a proxy is asked, is ``/path`` to us."""
    _, found, rest = target.partition("://")
    slash = rest.find("/")
    return rest[slash:] if found and slash >= 0 else target


class Responder(Struct, eq=False):
    """Writes one answer: ``send``, or ``start``, ``write`` any number of times, ``end``.

    ``chunked`` says whether the client understands chunks; one that speaks HTTP/1.0 does not.

    ``on_gone`` is called when the client leaves before the end; ``on_writable`` when a full
    buffer has drained. After the client has left, writes are dropped.
    """

    _connection: _ServerConnection
    _keep_alive: bool
    chunked: bool
    started: bool = False
    finished: bool = False
    gone: bool = False
    on_gone: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None

    @property
    def congested(self) -> bool:
        """Whether the client reads more slowly than we write."""
        return self._connection.congested

    def send(self, status: int, body: bytes, headers: Headers = (), lines: bytes = b"") -> None:
        """A whole answer. ``lines`` are further headers as they stand on the wire."""
        lines += b"content-length: %d\r\n" % len(body)
        self._write(_render_head(status, headers, lines, keep_alive=self._keep_alive) + body)
        self._finish()

    def send_json(self, status: int, document: object, headers: Headers = ()) -> None:
        self.send(status, orjson.dumps(document), (JSON_TYPE, *headers))

    def start(
        self,
        status: int,
        headers: Headers = (),
        lines: bytes = b"",
        first: bytes = b"",
        *,
        last: bool = False,
    ) -> None:
        """Begin an answer of unknown length: chunked, or ended by the close for HTTP/1.0.

        ``lines`` are further headers as they stand on the wire; ``first`` is a chunk that goes to
        the kernel together with the head. With ``last`` the answer ends with it.
        """
        self.started = True
        if self.chunked:
            lines += b"transfer-encoding: chunked\r\n"
        head = _render_head(status, headers, lines, keep_alive=self._keep_alive)
        self._write(head + self._framed(first, last=last))
        if last:
            self._finish()

    def write(self, data: bytes) -> None:
        """One chunk; its bytes go to the kernel now."""
        if data and not self.gone and not self.finished:
            self._connection.write(self._framed(data))

    def end(self, data: bytes = b"") -> None:
        """Nothing follows after the chunk ``data``."""
        self._write(self._framed(data, last=True))
        self._finish()

    def _framed(self, data: bytes, *, last: bool = False) -> bytes:
        if not self.chunked:
            return data
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return chunk + _LAST_CHUNK if last else chunk

    def pass_on(self, data: bytes) -> None:
        """Bytes of an answer that was rendered elsewhere, its head included."""
        self.started = True
        self._write(data)

    def hang_up(self) -> None:
        """The answer is whole and its connection ends with it."""
        self._keep_alive = False
        self._finish()

    def abort(self) -> None:
        """Close the connection in the middle, so that the client sees a broken answer."""
        self.finished = True
        self._connection.abort()

    def lose_client(self) -> None:
        """Called by the connection when the client has left."""
        if self.finished or self.gone:
            return
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()

    def _write(self, data: bytes) -> None:
        if data and not self.gone and not self.finished:
            self._connection.write(data)

    def _finish(self) -> None:
        if self.gone or self.finished:
            return
        self.finished = True
        self._connection.finish(keep_alive=self._keep_alive)


Handler = Callable[[Incoming, Responder], None]


_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def _render_head(status: int, headers: Headers, lines: bytes, *, keep_alive: bool) -> bytes:
    first = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    for name, value in headers:
        first += b"%b: %b\r\n" % (name, value)
    return first + lines + (b"\r\n" if keep_alive else b"connection: close\r\n\r\n")


class _ServerConnection(asyncio.Protocol):
    """One client. httptools calls the ``on_*`` methods."""

    def __init__(
        self, handler: Handler, connections: set[_ServerConnection], max_body_bytes: int
    ) -> None:
        self._handler = handler
        self._connections = connections
        self._max_body_bytes = max_body_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Incoming, Responder]] = deque()
        self._waiting_bytes = 0
        self._responder: Responder | None = None
        self._at_s = 0.0
        self._unsent_bytes = 0
        self._refused = 0
        self._taking = False
        self.congested = False
        self._reset()

    @property
    def busy(self) -> bool:
        """Whether an answer is under way, in the making or on the wire."""
        transport = self._transport
        if self._responder is not None:
            return True
        return transport is not None and transport.get_write_buffer_size() > 0

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def finish(self, *, keep_alive: bool) -> None:
        """The answer under way is whole: take the next request, or close."""
        self._responder = None
        if not keep_alive:
            self._forget_waiting()
            if self._transport is not None:
                self._transport.close()
        elif not self._taking:
            self._taking = True
            try:
                self._take_waiting()
            finally:
                self._taking = False

    def _take_waiting(self) -> None:
        """One after the other in a loop, as one read brings hundreds that are answered at once."""
        while self._waiting and self._responder is None:
            was_crowded = self._crowded
            incoming, responder = self._waiting.popleft()
            self._waiting_bytes -= len(incoming.body)
            if was_crowded and not self._crowded and self._transport is not None:
                self._transport.resume_reading()
            self._handle(incoming, responder)
        if self._refused and self._responder is None:
            self._say_refusal()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without being asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self._at_s = time.monotonic()

    def check_silence(self, now_s: float, read_limit_s: float, idle_limit_s: float) -> None:
        """Let go of a client from whom nothing comes, as long as it is its turn to speak.

        It is so too when it takes nothing of an answer that is all there.
        """
        if self._transport is None:
            return
        before, self._unsent_bytes = self._unsent_bytes, self._transport.get_write_buffer_size()
        silent_s = now_s - self._at_s
        if self._responder is not None or self._unsent_bytes != before:
            self._at_s = now_s
        elif self._unsent_bytes:
            if silent_s > idle_limit_s:
                self._transport.abort()  # a close would wait for it to be taken
        elif self._head_size and silent_s > read_limit_s:
            self._refuse(408)
        elif silent_s > idle_limit_s:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._connections.discard(self)
        self._transport = None
        self._forget_waiting()
        if self._responder is not None:
            self._responder.lose_client()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        if self._responder is not None and self._responder.on_writable is not None:
            self._responder.on_writable()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._at_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_in_http1(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self.abort()
            raise (error.__context__ or error) from None
        except httptools.HttpParserError:
            self._refuse(400)

    # httptools

    def on_url(self, target: bytes) -> None:
        self._target += target
        self._head_size += len(target)
        if self._head_size > MAX_HEAD_BYTES:
            self._refuse(431)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_HEAD_BYTES:
            self._refuse(431)
        if self._chunked:
            return  # a trailer: whoever looked at the head alone has not seen it
        self._headers.append((name, value))
        if name == b"expect" and self._responder is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_chunk_header(self) -> None:
        self._chunked = True

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_body_bytes:
            self._refuse(413)
        else:
            self._body.append(data)
            if len(self._body) == MAX_PIECES:
                self._joined += b"".join(self._body)
                self._body.clear()

    def on_message_complete(self) -> None:
        if self._refused or self._parser.should_upgrade():
            return
        incoming = Incoming(
            self._parser.get_method().decode(),
            self._target.decode("latin-1"),
            tuple(self._headers),
            self._whole_body(),
            self._at_s,
        )
        chunked = self._parser.get_http_version() != "1.0"
        responder = Responder(self, chunked and self._parser.should_keep_alive(), chunked)
        self._reset()
        if self._responder is None:
            self._handle(incoming, responder)
        else:
            self._waiting.append((incoming, responder))
            self._waiting_bytes += len(incoming.body)
            if self._crowded and self._transport is not None:
                self._transport.pause_reading()

    @property
    def _crowded(self) -> bool:
        """Whether as much waits as may; what comes then is left in the kernel."""
        full = self._waiting_bytes > self._max_body_bytes
        return full or len(self._waiting) >= MAX_PIPELINED

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _whole_body(self) -> bytes:
        last = b"".join(self._body)
        return bytes(self._joined + last) if self._joined else last

    def _go_on_in_http1(self, rest: bytes) -> None:
        """Read the request again as if it asked for no other protocol; ``rest`` is its body.

        Some clients (Java's) offer HTTP/2 with every first request and expect to be ignored.
        """
        method, target = self._parser.get_method(), self._target
        if method == b"CONNECT":
            self._refuse(501)
            return
        kept = [pair for pair in self._headers if pair[0] not in _OF_AN_UPGRADE]
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        lines = b"".join(b"%b: %b\r\n" % pair for pair in kept)
        self.data_received(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, target, lines, rest))

    def _handle(self, incoming: Incoming, responder: Responder) -> None:
        self._responder = responder
        self._handler(incoming, responder)

    def _reset(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._joined = bytearray()
        self._size = 0
        self._head_size = 0
        self._chunked = False

    def _refuse(self, status: int) -> None:
        """Once, behind the answers under way; nothing of this connection is read any more."""
        if self._refused:
            return
        self._refused = status
        if self._responder is None:
            self._say_refusal()

    def _say_refusal(self) -> None:
        lines = b"content-length: 0\r\n"
        self.write(_render_head(self._refused, (), lines, keep_alive=False))
        if self._transport is not None:
            self._transport.close()


class Server:
    """Listens and hands requests to ``handler``. ``port`` 0 takes a free one.

    A client may be silent for ``read_limit_s`` in the middle of a request, and between two for
    ``idle_limit_s``. Nothing limits how many there are but the files that the system allows.
    """

    def __init__(  # noqa: PLR0913  (an address and its limits)
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = MAX_BODY_BYTES,
        reuse_port: bool = False,
        read_limit_s: float = READ_LIMIT_S,
        idle_limit_s: float = CLIENT_IDLE_LIMIT_S,
    ) -> None:
        self._handler = handler
        self._host = host
        self._port = port
        self._max_body_bytes = max_body_bytes
        self._reuse_port = reuse_port
        self._read_limit_s = read_limit_s
        self._idle_limit_s = idle_limit_s
        self._server: asyncio.Server | None = None
        self._connections: set[_ServerConnection] = set()
        self._checking: asyncio.TimerHandle | None = None
        self._no_files = False

    def __repr__(self) -> str:
        return f"<Server {self.url} {len(self._connections)} connections>"

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return str(Origin("http", self._host, self._port))

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            EngineError: the port is taken or the address is not ours.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _ServerConnection(self._handler, self._connections, self._max_body_bytes),
                self._host,
                self._port,
                backlog=4096,
                reuse_port=self._reuse_port or None,
            )
        except OSError as error:
            raise EngineError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "choose another port or stop what listens there"
            ) from error
        for listening in self._server.sockets:
            probe_peer(listening)
        self._port = self._server.sockets[0].getsockname()[1]
        self._check_after_a_while()

    def _check_after_a_while(self) -> None:
        wait_s = min(self._read_limit_s, self._idle_limit_s) / CHECKS_PER_LIMIT
        self._checking = asyncio.get_running_loop().call_later(wait_s, self._check)

    def _check(self) -> None:
        now_s = time.monotonic()
        for connection in tuple(self._connections):
            connection.check_silence(now_s, self._read_limit_s, self._idle_limit_s)
        self._check_files()
        self._check_after_a_while()

    def _check_files(self) -> None:
        """Out of files, the loop closes new connections and tells nobody; so it is said here."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if not self._no_files:
                log.error(  # noqa: TRY400  (a sentence, no trace)
                    "new clients of port %d are turned away: %s at %d connections; "
                    "raise the limit of open files (ulimit -n)",
                    self._port, error.strerror, len(self._connections),
                )  # fmt: skip
            self._no_files = True
        else:
            self._no_files = False

    @property
    def busy(self) -> bool:
        """Whether a client still waits for some of its answer."""
        return any(connection.busy for connection in self._connections)

    def stop_listening(self) -> None:
        """Take no new connection; those that are open go on."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self.stop_listening()
        if self._checking is not None:
            self._checking.cancel()
        for connection in tuple(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
