"""HTTP/1.1 client on ``asyncio.Protocol`` and httptools: keep-alive pools without a cap.

An exchange is driven by callbacks. Bytes are stamped once, where they arrive, before anything is
parsed. The load client reads events from them; the router passes them on as they are.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections import defaultdict
from typing import Protocol, cast

import httptools
from msgspec import Struct

from ppdbench.http.errors import (
    BrokenError,
    CancelledExchangeError,
    ConnectError,
    HttpError,
    OutOfFilesError,
)
from ppdbench.http.keepalive import limit_unacknowledged, probe_peer
from ppdbench.http.messages import Head, Origin, Request, Response

IDLE_LIMIT_S = 4.0
"""uvicorn, and so vLLM, closes an idle connection after 5 s; we give it up before."""

CONNECT_TIMEOUT_S = 10.0

CROSSING_LIMIT_S = 0.5
"""A close that a request crossed is seen within a round trip; the rest is for a loaded machine."""

CONNECT_AT_ONCE = 64
"""Of connections that are opened ahead: a listener keeps about a hundred waiting, and those beyond
are tried again only after a second."""


class Sink(Protocol):
    """Receives one answer: ``on_head``, ``on_body`` any number of times, then one of the last two.

    ``at_s`` is ``time.monotonic()`` of the read that brought the bytes. One read's bytes of a body
    come in one piece, however many chunks they were. A ``1xx`` head is swallowed. Methods must not
    block; they may start the next exchange.
    """

    def on_head(self, head: Head, at_s: float) -> None: ...
    def on_body(self, data: bytes, at_s: float) -> None: ...
    def on_end(self, at_s: float) -> None: ...
    def on_failure(self, error: HttpError, at_s: float) -> None: ...


class Exchange(Struct, eq=False):
    """One request and its answer. ``sent_at_s`` is when the request was given to the kernel.

    ``whole`` says inside ``on_body`` that this is the last of it and ``on_end`` follows at once.
    """

    origin: Origin
    wire: bytes
    sink: Sink
    sent_at_s: float | None = None
    got_bytes: bool = False
    retried: bool = False
    whole: bool = False
    done: bool = False
    _connection: _Connection | None = None
    _opening: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Exchange with {self.origin}, {'done' if self.done else 'under way'}>"

    def pause(self) -> None:
        """Stop reading from the server, so that it feels a slow reader behind us."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def cancel(self) -> None:
        """Give it up: the connection closes at once and the sink hears of it."""
        if self.done:
            return
        connection, opening = self._connection, self._opening
        self.fail(CancelledExchangeError("cancelled", got_bytes=self.got_bytes))
        if connection is not None:
            connection.abort()
        if opening is not None:
            opening.cancel()

    def fail(self, error: HttpError) -> None:
        """End with ``error``; the first end counts."""
        if self.done:
            return
        self._finish()
        self.sink.on_failure(error, time.monotonic())

    def succeed(self, at_s: float) -> None:
        """End well; the first end counts."""
        if self.done:
            return
        self._finish()
        self.sink.on_end(at_s)

    def crossed_a_close(self, now_s: float) -> bool:
        """Whether its idle connection closed while it was on its way, and nobody read it.

        A server that closes only later has read it, may have computed, and is not asked again.
        """
        if self.got_bytes or self.retried or self.sent_at_s is None:
            return False
        return now_s - self.sent_at_s < CROSSING_LIMIT_S

    def opening_in(self, task: asyncio.Task[None] | None) -> None:
        """Remember the task that makes the connection, so that ``cancel`` reaches it."""
        self._opening = task

    def carried_by(self, connection: _Connection) -> None:
        """Send on ``connection`` now."""
        self._opening = None
        self._connection = connection
        connection.carry(self)

    def _finish(self) -> None:
        self.done = True
        self._connection = None
        self._opening = None


class _Connection(asyncio.Protocol):
    """One TCP connection, at most one exchange at a time. httptools calls the ``on_*`` methods."""

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self._pool = pool
        self._origin = origin
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._asked_pieces = 0
        # No frame of ours per chunk: a read may bring dozens, and they are told of together.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = b""
        self._at_s = 0.0
        self._head: Head | None = None
        self._swallow = False
        self._whole = False
        self._foul = False
        self._reading = True
        self.idle_since_s = 0.0
        self.served = 0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def carry(self, exchange: Exchange) -> None:
        assert self._exchange is None
        assert self._transport is not None
        self._exchange = exchange
        self._head = None
        exchange.sent_at_s = time.monotonic()
        self._transport.write(exchange.wire)

    def pause(self) -> None:
        if self._reading and self.usable:
            self._reading = False
            assert self._transport is not None
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and self.usable:
            self._reading = True
            assert self._transport is not None
            self._transport.resume_reading()

    def abort(self) -> None:
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without being asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        probe_peer(sock)
        limit_unacknowledged(sock)

    def data_received(self, data: bytes) -> None:
        self._at_s = time.monotonic()
        exchange = self._exchange
        if exchange is None:
            self.abort()  # nobody asked: these bytes must not become the next answer's
            return
        exchange.got_bytes = True
        try:
            self._read(exchange, data)
        except Exception:
            self.abort()
            exchange.fail(BrokenError("our own reader failed", got_bytes=True))
            raise
        if self._whole:
            self._settle(exchange)

    def _read(self, exchange: Exchange, data: bytes) -> None:
        """Parse one read and tell of its head and its body."""
        refusal: object = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise (error.__context__ or error) from None
        except httptools.HttpParserUpgrade:
            self._foul = True
            refusal = "it goes on in another protocol"
        except httptools.HttpParserError as error:
            self._foul = True
            refusal = error
        if self._foul and self._whole:
            del self._pieces[self._asked_pieces :]
        if self._pieces:
            self._tell_body(exchange)
        if refusal is not None and not self._whole:
            self._break(f"the answer of {self._origin} is no HTTP/1.1: {refusal}")

    def _tell_body(self, exchange: Exchange) -> None:
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if not exchange.done:
            exchange.whole = self._whole
            exchange.sink.on_body(body, self._at_s)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self._origin, self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is None and self._head is not None and _ends_with_connection(self._head):
            exchange.succeed(time.monotonic())
        elif self.served and exchange.crossed_a_close(time.monotonic()):
            exchange.retried = True
            self._pool.open_for(exchange)
        else:
            exchange.fail(self._closed(exchange, error))

    # httptools

    def on_message_begin(self) -> None:
        self._reason, self._headers = b"", []  # trailers of the last answer are none of this one's
        self._foul = self._foul or self._whole

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        head = Head(self._parser.get_status_code(), self._reason, tuple(self._headers))
        self._swallow = head.status < 200
        if self._exchange is None or self._swallow or self._whole:
            return
        self._head = head
        self._exchange.sink.on_head(head, self._at_s)

    def on_message_complete(self) -> None:
        if not self._swallow and not self._whole:
            self._whole = True
            self._asked_pieces = len(self._pieces)
            self._foul = not self._parser.should_keep_alive()

    def _settle(self, exchange: Exchange) -> None:
        """Hand the connection back before the answer is told, unless more came than was asked."""
        foul, self._whole, self._foul = self._foul, False, False
        if self._exchange is None:
            return
        self._exchange = None
        self.served += 1
        if not self._reading:
            self.resume()
        if not foul:
            self._pool.keep(self._origin, self, self._at_s)
        elif self._transport is not None:
            self._transport.close()
        exchange.succeed(self._at_s)

    def _break(self, message: str) -> None:
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.fail(BrokenError(message, got_bytes=True))

    def _closed(self, exchange: Exchange, error: Exception | None) -> BrokenError:
        where = "in the middle of its answer" if exchange.got_bytes else "without an answer"
        cause = f" ({error})" if error else ""
        message = f"{self._origin} closed the connection {where}{cause}"
        return BrokenError(message, got_bytes=exchange.got_bytes)


_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


def _ends_with_connection(head: Head) -> bool:
    for name, _ in head.headers:
        if name.lower() in _FRAMING:
            return False
    return head.status not in (204, 304)


class Pool:
    """Keep-alive connections by origin. There is no cap: open loop means that nothing waits here.

    A request that meets a dead idle connection is sent once more on a new one, only when not a
    single byte of an answer had come.
    """

    def __init__(
        self, *, tls: ssl.SSLContext | None = None, idle_limit_s: float = IDLE_LIMIT_S
    ) -> None:
        self._tls = tls
        self._idle_limit_s = idle_limit_s
        self._idle: defaultdict[Origin, list[_Connection]] = defaultdict(list)
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        idle = sum(map(len, self._idle.values()))
        return f"<Pool {len(self._all)} connections, {idle} idle>"

    def start(self, origin: Origin, request: Request, sink: Sink) -> Exchange:
        """Send now, on an idle connection if there is one. Returns at once."""
        return self.start_raw(origin, request.render(origin), sink)

    def start_raw(self, origin: Origin, wire: bytes, sink: Sink) -> Exchange:
        """As :meth:`start` for bytes that are already rendered."""
        exchange = Exchange(origin, wire, sink)
        connection = self._take(origin)
        if connection is None:
            self.open_for(exchange)
        else:
            exchange.carried_by(connection)
        return exchange

    async def fetch(self, origin: Origin, request: Request, *, timeout_s: float = 30.0) -> Response:
        """A whole answer, whatever its status.

        Raises:
            HttpError: the exchange failed or took longer than ``timeout_s``.
        """
        sink = _Collector()
        exchange = self.start(origin, request, sink)
        try:
            async with asyncio.timeout(timeout_s):
                return await sink.response
        except TimeoutError:
            raise BrokenError(
                f"{origin}{request.target} gave no whole answer in {timeout_s:g} s; "
                "is the server up and not overloaded?",
                got_bytes=exchange.got_bytes,
            ) from None
        finally:
            exchange.cancel()

    async def warm(self, origin: Origin, connections: int) -> None:
        """Open ``connections`` before they are needed, or as many as can be had.

        Raises:
            ConnectError: there is none.
        """
        for wanted in range(connections, 0, -CONNECT_AT_ONCE):
            tries = (self._connect(origin) for _ in range(min(wanted, CONNECT_AT_ONCE)))
            problems = []
            for opened in await asyncio.gather(*tries, return_exceptions=True):
                if isinstance(opened, _Connection):
                    self.keep(origin, opened, time.monotonic())
                else:
                    problems.append(opened)
            for problem in problems:
                if not (self._idle[origin] and isinstance(problem, HttpError)):
                    raise problem
            if problems:
                return

    async def close(self) -> None:
        """Close everything; exchanges under way fail."""
        for task in tuple(self._opening):
            task.cancel()
        for connection in tuple(self._all):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)

    def open_for(self, exchange: Exchange) -> None:
        """Make a new connection and send ``exchange`` on it."""
        task = asyncio.get_running_loop().create_task(self._open_and_carry(exchange))
        exchange.opening_in(task)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def keep(self, origin: Origin, connection: _Connection, at_s: float) -> None:
        """Take a connection back for the next exchange."""
        connection.idle_since_s = at_s
        self._idle[origin].append(connection)

    def forget(self, origin: Origin, connection: _Connection) -> None:
        """The connection is gone."""
        self._all.discard(connection)
        idle = self._idle.get(origin)
        if idle and connection in idle:
            idle.remove(connection)

    def _take(self, origin: Origin) -> _Connection | None:
        """The most recently used idle connection; stale ones are dropped on the way."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if not connection.usable:
                continue
            if time.monotonic() - connection.idle_since_s <= self._idle_limit_s:
                return connection
            connection.abort()
        return None

    async def _open_and_carry(self, exchange: Exchange) -> None:
        try:
            connection = await self._connect(exchange.origin)
        except HttpError as error:
            exchange.fail(error)
            return
        if exchange.done:
            self.keep(exchange.origin, connection, time.monotonic())
        elif connection.usable:
            exchange.carried_by(connection)
        else:
            exchange.fail(BrokenError(f"{exchange.origin} closed the connection at once"))

    async def _connect(self, origin: Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        tls = self._tls_context() if origin.scheme == "https" else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin), origin.host, origin.port, ssl=tls
                )
        except TimeoutError:
            raise ConnectError(f"{origin} took no connection in {CONNECT_TIMEOUT_S:g} s") from None
        except UnicodeError as error:
            # A name that no resolver is asked for: an empty label, or one that is too long.
            raise ConnectError(f"cannot connect to {origin}: this is no host name") from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise OutOfFilesError(
                    f"no connection to {origin}: {error.strerror}; "
                    "raise the limit of open files (ulimit -n)"
                ) from error
            raise ConnectError(
                f"cannot connect to {origin}: {error.strerror or error}; is the server running?"
            ) from error
        self._all.add(connection)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        """Made once: reading the system's authorities takes longer than a handshake."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Collector:
    """A sink that keeps the whole answer."""

    def __init__(self) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._head: Head | None = None
        self._parts: list[bytes] = []

    def on_head(self, head: Head, at_s: float) -> None:  # noqa: ARG002
        self._head = head

    def on_body(self, data: bytes, at_s: float) -> None:  # noqa: ARG002
        self._parts.append(data)

    def on_end(self, at_s: float) -> None:  # noqa: ARG002
        assert self._head is not None
        if not self.response.done():
            self.response.set_result(Response(self._head, b"".join(self._parts)))

    def on_failure(self, error: HttpError, at_s: float) -> None:  # noqa: ARG002
        if not self.response.done():
            self.response.set_exception(error)
