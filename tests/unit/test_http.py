"""The client and the server shell against each other and against misbehaving peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time

import pytest

from ppdbench.core.errors import EngineError, UsageError
from ppdbench.http.client import Pool
from ppdbench.http.errors import BrokenError, CancelledExchangeError, ConnectError, OutOfFilesError
from ppdbench.http.messages import Origin, Request
from ppdbench.http.server import Server


class Recorder:
    """A sink that keeps everything."""

    def __init__(self):
        self.head = None
        self.bodies = []
        self.error = None
        self.done = asyncio.Event()
        self.first = asyncio.Event()

    def on_head(self, head, at_s):
        self.head = head

    def on_body(self, data, at_s):
        self.bodies.append((at_s, data))
        self.first.set()

    def on_end(self, at_s):
        self.done.set()

    def on_failure(self, error, at_s):
        self.error = error
        self.done.set()


@pytest.fixture
async def pool():
    pool = Pool()
    yield pool
    await pool.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110  (any condition, not an event)
        await asyncio.sleep(0.001)


async def raw_server(serve):
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, Origin("http", "127.0.0.1", server.sockets[0].getsockname()[1])


def echo(incoming, responder):
    responder.send(200, incoming.body, ((b"x-target", incoming.target.encode()),))


async def test_a_connection_is_kept_and_used_again(pool):
    """Ten requests one after the other need one connection."""
    async with Server(echo) as server:
        origin = Origin.parse(server.url)
        for i in range(10):
            response = await pool.fetch(origin, Request("POST", f"/{i}", (), b"%d" % i))
            assert response.body == b"%d" % i
            assert response.head.get(b"X-Target") == b"/%d" % i

        assert repr(pool) == "<Pool 1 connections, 1 idle>"


async def test_nothing_waits_for_a_free_connection(pool):
    """Open loop: two hundred requests at once are two hundred connections."""
    waiting = []
    async with Server(lambda _, responder: waiting.append(responder)) as server:
        origin = Origin.parse(server.url)
        fetches = [asyncio.create_task(pool.fetch(origin, Request("GET", "/"))) for _ in range(200)]
        await until(lambda: len(waiting) == 200)
        for responder in waiting:
            responder.send(200, b"")
        await asyncio.gather(*fetches)

        assert repr(pool) == "<Pool 200 connections, 200 idle>"


async def test_chunks_arrive_with_instants_before_the_end(pool):
    """A body is handed on as it comes, never collected."""
    responders = []
    async with Server(lambda _, responder: responders.append(responder)) as server:
        sink = Recorder()
        pool.start(Origin.parse(server.url), Request("GET", "/"), sink)
        await until(lambda: responders)
        responders[0].start(200)
        responders[0].write(b"one")
        await sink.first.wait()
        assert not sink.done.is_set()
        responders[0].write(b"two")
        responders[0].end()
        await sink.done.wait()

    assert b"".join(data for _, data in sink.bodies) == b"onetwo"
    assert sink.bodies[0][0] <= sink.bodies[-1][0]


async def test_one_read_is_told_of_in_one_piece(pool):
    """Chunks that came together are handed on together, less what follows the answer."""
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    answer += b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer + answer)
        await writer.drain()
        writer.close()

    server, origin = await raw_server(serve)
    async with server:
        sink = Recorder()
        pool.start(origin, Request("GET", "/"), sink)
        await sink.done.wait()

    assert [data for _, data in sink.bodies] == [b"onetwo"]


async def test_a_sink_that_fails_breaks_its_exchange_alone(pool):
    """The error is told, the connection is not used again."""

    class Failing(Recorder):
        def on_body(self, data, at_s):
            raise RuntimeError("no")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with Server(lambda _, responder: responder.send(200, b"x")) as server:
        sink = Failing()
        pool.start(Origin.parse(server.url), Request("GET", "/"), sink)
        await sink.done.wait()
        await until(lambda: repr(pool) == "<Pool 0 connections, 0 idle>")

    assert isinstance(sink.error, BrokenError)


async def test_cancelling_closes_the_connection(pool):
    """The server must see that nobody wants the answer."""
    gone = asyncio.Event()

    def handler(_, responder):
        responder.on_gone = gone.set
        responder.start(200)
        responder.write(b"x")

    async with Server(handler) as server:
        sink = Recorder()
        exchange = pool.start(Origin.parse(server.url), Request("GET", "/"), sink)
        await sink.first.wait()
        exchange.cancel()
        await asyncio.wait_for(gone.wait(), 5)

    assert isinstance(sink.error, CancelledExchangeError)


async def test_a_paused_reader_stops_the_server(pool):
    """Back-pressure reaches the other end, and goes away."""
    state = {}

    def handler(_, responder):
        state["responder"] = responder
        responder.start(200)

    async with Server(handler) as server:
        sink = Recorder()
        exchange = pool.start(Origin.parse(server.url), Request("GET", "/"), sink)
        await until(lambda: sink.head)
        exchange.pause()
        written = 0
        while not state["responder"].congested:
            state["responder"].write(b"x" * 65536)
            written += 65536
            await asyncio.sleep(0)
        assert sum(len(data) for _, data in sink.bodies) < written
        exchange.resume()
        state["responder"].end()
        await sink.done.wait()

    assert sum(len(data) for _, data in sink.bodies) == written


async def test_nobody_listening_is_a_connect_error(pool):
    """The text names the address and asks the right question."""
    async with Server(echo) as server:
        origin = Origin.parse(server.url)

    with pytest.raises(ConnectError, match=f"{origin.port}.*is the server running"):
        await pool.fetch(origin, Request("GET", "/"))


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_a_name_that_cannot_be_looked_up_is_a_connect_error(pool, host):
    """At once: the resolver refuses it with an error of another kind than all others."""
    with pytest.raises(ConnectError, match="no host name"):
        await pool.fetch(Origin("http", host, 80), Request("GET", "/"), timeout_s=2)


@pytest.mark.parametrize(
    ("answer", "got_bytes"),
    [
        (b"", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", True),
        (b"this is no HTTP\r\n\r\n", True),
    ],
)
async def test_a_connection_that_closes_early_is_broken(pool, answer, got_bytes):
    """Half an answer is never taken for a whole one."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server, origin = await raw_server(serve)
    async with server:
        with pytest.raises(BrokenError) as caught:
            await pool.fetch(origin, Request("GET", "/"))

    assert caught.value.got_bytes is got_bytes


async def test_a_server_that_closes_at_once_breaks_every_exchange(pool):
    """Closed before, while or after the request is written: each ends, none hangs."""

    async def serve(_, writer):
        writer.close()

    server, origin = await raw_server(serve)
    async with server:
        fetches = [pool.fetch(origin, Request("GET", "/"), timeout_s=20) for _ in range(50)]
        results = await asyncio.gather(*fetches, return_exceptions=True)

    assert {type(result) for result in results} == {BrokenError}
    assert not any("gave no whole answer" in str(result) for result in results)


async def test_a_body_may_end_with_the_connection(pool):
    """HTTP/1.0 manners: no length, no chunks, the close is the end."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await writer.drain()
        writer.close()

    server, origin = await raw_server(serve)
    async with server:
        response = await pool.fetch(origin, Request("GET", "/"))

    assert response.body == b"all of it"


async def test_a_request_that_meets_a_dead_idle_connection_is_sent_once_more(pool):
    """A server may close an idle connection at any time; that is no failed turn."""
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        if len(connections) == 1:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server, origin = await raw_server(serve)
    async with server:
        assert (await pool.fetch(origin, Request("GET", "/"))).body == b"ok"
        assert (await pool.fetch(origin, Request("GET", "/"))).body == b"ok"

    assert len(connections) == 2


async def test_fewer_connections_ahead_than_wanted_are_enough(pool, monkeypatch):
    """A server, a proxy or the limit of open files may allow fewer; none at all is an error."""
    connect, tried = Pool._connect, []

    async def limited(self, origin):
        tried.append(origin)
        if len(tried) in {2, 4} or len(tried) > 5:
            raise ConnectError("Too many open files")
        return await connect(self, origin)

    monkeypatch.setattr(Pool, "_connect", limited)
    async with Server(echo) as server:
        await pool.warm(Origin.parse(server.url), 8)
        assert repr(pool) == "<Pool 3 connections, 3 idle>"

    other = Pool()
    with pytest.raises(ConnectError, match="open files"):
        await other.warm(Origin.parse(server.url), 8)


async def test_connections_ahead_do_not_overrun_a_listener(pool, monkeypatch):
    """Beyond its backlog, 100 in asyncio, the kernel drops what comes, for a second at least."""
    connect, under_way, most = Pool._connect, [], []

    async def counted(self, origin):
        under_way.append(origin)
        most.append(len(under_way))
        try:
            return await connect(self, origin)
        finally:
            under_way.pop()

    monkeypatch.setattr(Pool, "_connect", counted)
    async with Server(echo) as server:
        await pool.warm(Origin.parse(server.url), 300)
        assert repr(pool) == "<Pool 300 connections, 300 idle>"

    assert max(most) <= 100


async def test_a_peer_that_vanishes_is_noticed_on_either_side(pool):
    """Nothing tells a cut link from a slow peer but its kernel's answer to a probe."""
    accepted = []

    async with Server(lambda incoming, responder: accepted.append(responder)) as server:
        exchange = pool.start(Origin.parse(server.url), Request("GET", "/"), Recorder())
        await until(lambda: accepted)
        ends = [exchange._connection._transport, accepted[0]._connection._transport]
        sockets = [end.get_extra_info("socket") for end in ends]
        probed = [
            sock.getsockopt(level, option)
            for sock in sockets
            for level, option in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            )
        ]
        unconfirmed_ms = sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        exchange.cancel()

    assert probed == [1, 30, 10, 3] * 2
    assert unconfirmed_ms == 60_000


async def test_an_interim_answer_is_swallowed(pool):
    """100 Continue is not the answer."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Made\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server, origin = await raw_server(serve)
    async with server:
        assert (await pool.fetch(origin, Request("GET", "/"))).head.status == 201


async def test_a_silent_server_costs_no_more_than_the_timeout(pool):
    """The text says where and how long."""
    async with Server(lambda *_: None) as server:
        with pytest.raises(BrokenError, match=r"/slow gave no whole answer in 0\.05 s"):
            await pool.fetch(Origin.parse(server.url), Request("GET", "/slow"), timeout_s=0.05)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf", b"HTTP/1.1 408 Request Timeout"),
        (b"POST / HTTP/1.1\r\nhost:", b"HTTP/1.1 408 Request Timeout"),
        (b"", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK"),
    ],
)
async def test_a_silent_client_is_let_go(sent, told):
    """With 408 in the middle of a request; between two the connection just closes."""
    async with Server(echo, read_limit_s=0.1, idle_limit_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()

    assert answer.partition(b"\r\n")[0] == told


async def test_a_client_that_does_not_take_its_answer_is_let_go():
    """However long it is; one that takes some of it between two checks is served on."""
    body = b"x" * 40_000_000
    async with Server(lambda _, responder: responder.send(200, body)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(until(lambda: server.busy), 5)
        (connection,) = server._connections
        now_s = time.monotonic()
        for _ in range(5):
            await reader.readexactly(4_000_000)
            now_s += 200.0
            connection.check_silence(now_s, 60.0, 180.0)
        kept = server.busy
        writer.transport.pause_reading()

        async with asyncio.timeout(5):
            while server._connections:
                now_s += 200.0
                connection.check_silence(now_s, 60.0, 180.0)
                await asyncio.sleep(0.001)
        writer.transport.abort()

    assert kept


async def test_a_client_that_is_waited_for_by_nobody_may_be_silent():
    """While its answer is in the making the silence is ours, and the next request has all its time.

    So has one that sends little by little.
    """
    responders = []
    async with Server(lambda _, responder: responders.append(responder)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.wait_for(until(lambda: server._connections), 5)
        (connection,) = server._connections
        for sent in (b"GET / HT", b"TP/1.1\r\nx:", b" y\r\n\r\n"):
            before_s = connection._at_s
            writer.write(sent)
            await asyncio.wait_for(until(lambda: connection._at_s > before_s), 5)  # noqa: B023
            connection.check_silence(connection._at_s + 59.0, 60.0, 180.0)
        answered_s = time.monotonic() + 1000.0
        connection.check_silence(answered_s, 60.0, 180.0)
        responders[0].send(200, b"one")
        await reader.readuntil(b"one")
        connection.check_silence(answered_s + 179.0, 60.0, 180.0)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(until(lambda: len(responders) == 2), 5)
        responders[1].send(200, b"two")
        answer = await reader.readuntil(b"two")
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def no_more_files():
    """This process gets no further file inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in taken:
            os.close(file)


async def test_without_files_a_server_says_so_once_and_a_client_blames_nobody(pool, caplog):
    """A peer that we cannot connect to for that is no dead peer; served clients stay served."""
    async with Server(echo, read_limit_s=0.12) as server:
        origin = Origin.parse(server.url)
        await pool.fetch(origin, Request("GET", "/"))
        with no_more_files():
            await asyncio.wait_for(until(lambda: caplog.records), 5)
            await asyncio.sleep(0.05)
            said = [record.message for record in caplog.records]
            kept = await pool.fetch(origin, Request("GET", "/"))
            with pytest.raises(OutOfFilesError, match="ulimit -n"):
                await Pool().fetch(origin, Request("GET", "/"))

    assert kept.ok
    assert len(said) == 1
    assert "are turned away: Too many open files at 1 connections" in said[0]


async def test_requests_on_one_connection_are_answered_in_order():
    """Pipelined requests wait for each other."""
    async with Server(echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        one = b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n"
        writer.write(one + b"a" + one + b"b")
        text = await reader.readuntil(b"a") + await reader.readuntil(b"\r\n\r\nb")
        writer.close()

    assert text.count(b"200 OK") == 2


async def test_nonsense_from_a_client_is_400():
    """The server shell answers and closes."""
    async with Server(echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"nonsense\r\n\r\n")
        text = await reader.read()
        writer.close()

    assert text.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("apart", [False, True])
async def test_an_offer_of_http2_is_passed_over(apart):
    """Java makes one with its first request, body included; the answer is plain HTTP/1.1."""
    head = (
        b"POST /a?b HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABk\r\ncontent-length: 4\r\n\r\n"
    )
    plain = b"POST /c HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"
    async with Server(echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for piece in (head, b"body", plain) if apart else (head + b"body" + plain,):
            writer.write(piece)
            await asyncio.sleep(0.02)
        first = await reader.readuntil(b"body")
        second = await reader.readuntil(b"hi")
        writer.close()

    assert first.startswith(b"HTTP/1.1 200 OK\r\nx-target: /a?b\r\n")
    assert second.startswith(b"HTTP/1.1 200 OK\r\nx-target: /c\r\n")


async def test_a_tunnel_is_refused():
    """CONNECT asks for another protocol altogether."""
    async with Server(echo) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n")
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 501 ")


async def test_a_taken_port_is_one_sentence():
    """It names the port and what to do."""
    async with Server(echo) as server:
        with pytest.raises(EngineError, match=f"{server.port}.*choose another port"):
            await Server(echo, port=server.port).start()


def test_an_ipv6_address_stands_in_brackets():
    """So that the URL that is told can be used."""
    assert Server(echo, host="::1", port=8000).url == "http://[::1]:8000"


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://", "http://h:99999"])
def test_a_url_that_is_none_is_refused(url):
    """The text repeats it."""
    with pytest.raises(UsageError, match=url):
        Origin.parse(url)


def test_an_origin_keeps_path_and_brackets():
    """Prefixes such as /proxy are put before every target."""
    origin = Origin.parse("http://[::1]:8000/proxy/")

    assert origin.authority == "[::1]:8000"
    assert Request("GET", "/v1/models").render(origin).startswith(b"GET /proxy/v1/models HTTP/1.1")


async def test_bytes_that_nobody_asked_for_never_become_the_next_answer():
    """A server that sends two answers to one request loses its connection, not our second one."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n"
    asked = []

    async def serve(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            asked.append(1)
            writer.write(answer + str(len(asked)).encode() + answer + b"X")
            await writer.drain()

    server = await asyncio.start_server(_until_closed(serve), "127.0.0.1", 0)
    origin = Origin("http", "127.0.0.1", server.sockets[0].getsockname()[1])
    pool = Pool()

    bodies = [(await pool.fetch(origin, Request("GET", "/"))).body for _ in range(3)]
    await pool.close()
    server.close()

    assert bodies == [b"1", b"2", b"3"]


def _until_closed(serve):
    async def handle(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()

    return handle


async def test_trailers_of_one_answer_are_no_headers_of_the_next(pool):
    """They belong to whoever asked first."""
    answers = iter([b"x-secret: 1\r\n", b""])

    def serve(_, responder):
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        responder.pass_on(head + next(answers) + b"\r\n")
        responder.end()

    async with Server(serve) as server:
        await pool.fetch(Origin.parse(server.url), Request("GET", "/"))
        second = await pool.fetch(Origin.parse(server.url), Request("GET", "/"))

    assert second.head.get(b"x-secret") is None
