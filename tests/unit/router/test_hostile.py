"""Clients that mean harm and nodes that break the rules: nothing of it reaches anyone else."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc

import pytest

from ppdbench.http.client import Pool
from ppdbench.http.errors import BrokenError
from ppdbench.http.messages import Origin, Request
from ppdbench.http.server import Server
from ppdbench.router.control import ReplayTransport

CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def exchanged(url: str, sent: bytes) -> bytes:
    """All that a server answers to ``sent`` until it closes or is silent for a moment."""
    origin = Origin.parse(url)
    reader, writer = await asyncio.open_connection(origin.host, origin.port)
    got = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(5):
            while b"\r\n\r\n" not in got and (piece := await reader.read(65536)):
                got += piece
        async with asyncio.timeout(0.1):
            while piece := await reader.read(65536):
                got += piece
    except TimeoutError:
        pass
    finally:
        writer.close()
    return got


@pytest.fixture
async def echo():
    """A server that keeps what it is asked, and answers with the length of the body."""
    asked = []

    def answer(incoming, responder):
        asked.append(incoming)
        responder.send_json(200, len(incoming.body))

    async with Server(answer, max_body_bytes=1_000_000) as server:
        server.asked = asked
        yield server


@pytest.mark.parametrize("chunks", [b"2\r\nab\r\n", b""], ids=["a body", "no body"])
async def test_trailers_are_no_headers(echo, chunks):
    """Whoever judged the head has not seen them."""
    body = chunks + b"0\r\nauthorization: Bearer k\r\nx-session-id: other\r\n\r\n"

    got = await exchanged(echo.url, CHUNKED % b"/x" + body)

    assert got.endswith(b"2" if chunks else b"0")
    assert [name for name, _ in echo.asked[0].headers] == [b"host", b"transfer-encoding"]


async def test_a_body_in_very_many_chunks_costs_no_multiple_of_itself(echo):
    """Pieces are joined on the way, or each of two bytes would cost forty."""
    count = 200_001
    pieces = [b"%02x" % (number % 256) for number in range(count)]
    sent = CHUNKED % b"/x" + b"2\r\n" + b"\r\n2\r\n".join(pieces) + b"\r\n0\r\n\r\n"
    tracemalloc.start()
    try:
        await exchanged(echo.url, sent)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert echo.asked[0].body == b"".join(pieces)
    assert peak_bytes < 5_000_000


async def test_long_requests_that_wait_are_left_in_the_kernel():
    """One connection keeps one body's limit or so in memory, and all are answered in the end."""
    waiting = []

    async with Server(lambda *asked: waiting.append(asked), max_body_bytes=1_000_000) as server:
        origin = Origin.parse(server.url)
        reader, writer = await asyncio.open_connection(origin.host, origin.port)
        one = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" + b"x" * 900_000
        writer.write(one * 30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await writer.drain()
        for number in range(30):
            async with asyncio.timeout(5):
                while len(waiting) == number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            waiting[-1][1].send_json(200, number)
        async with asyncio.timeout(5):
            await reader.readuntil(b"29")
        writer.close()


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_a_refused_head_request_has_no_body(bench_for, keys):
    """It would be read as the beginning of the next answer."""
    bench = await bench_for("1R", client_keys=keys)

    got = await exchanged(bench.router.url, b"HEAD /metrics HTTP/1.1\r\nhost: x\r\n\r\n")

    assert got.endswith(b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 401" if keys else b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "lines",
    [b"host: x\r\nx: " + b"a" * 20_000, b"host: x" + b"\r\na: b" * 300, b"a: b"],
    ids=["long", "many", "no host"],
)
async def test_what_passes_may_have_the_head_that_a_turn_may_have(bench_for, lines, caplog):
    """One limit for all, and a client's fault leaves no trace in the log."""
    bench = await bench_for("1R")
    sent = b"GET /v1/other HTTP/1.1\r\n%b\r\n\r\n" % lines

    with caplog.at_level(logging.INFO):
        got = await exchanged(bench.router.url, sent)
        refused = await exchanged(bench.router.url, sent.replace(b"a: b", b"host: y\r\nhost: z"))

    assert got.startswith(b"HTTP/1.1 404")  # the engine's own
    assert b"404" in refused or b"400" in refused
    assert not caplog.records


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/../metrics"), ("POST", "/v1/%2e%2e/metrics"), ("TRACE", "/v1/other")],
)
async def test_what_would_leave_v1_or_show_the_nodes_key_is_not_passed(bench_for, method, path):
    """A proxy before the node may resolve dots; TRACE answers with the head, the key in it."""
    bench = await bench_for("1R")

    got = await exchanged(bench.router.url, f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    assert b"no node is asked this" in got


async def test_the_cap_holds_for_what_is_no_turn(bench_for):
    """Else streams of /v1/responses would have none; what they took is given back."""
    bench = await bench_for("1R", max_in_flight=1)

    bench.router.services.metrics.in_flight.add()
    refused = await bench.post("/v1/other", {})
    bench.router.services.metrics.in_flight.add(-1)
    served = await bench.post("/v1/other", {})

    assert (refused.status, refused.header("retry-after"), served.status) == (429, "1", 404)
    assert bench.router.services.metrics.in_flight.total() == 0


async def _speaks(reader, writer, answers):
    """One answer of raw bytes per request on this connection; ``None`` closes it."""
    for answer in answers:
        try:
            await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        if callable(answer):
            await answer()
        elif answer is not None:
            writer.write(answer)
            continue
        break
    writer.close()


async def test_a_server_that_switches_protocols_is_broken():
    """Nobody asked for it: one sentence, no fault of our own."""
    switch = b"HTTP/1.1 101 Switching\r\nupgrade: foo\r\nconnection: upgrade\r\n\r\nhi"
    server = await asyncio.start_server(lambda r, w: _speaks(r, w, [switch]), "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    pool = Pool()

    with pytest.raises(BrokenError, match="another protocol"):
        await pool.fetch(Origin("http", "127.0.0.1", port), Request("GET", "/"), timeout_s=5)

    await pool.close()
    server.close()


async def test_what_was_read_is_not_sent_again():
    """A connection that closes long after the request was not idle: somebody computed for it."""
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    met = []

    async def dies_late() -> None:
        await asyncio.sleep(0.7)

    async def serve(reader, writer) -> None:
        met.append(writer)
        await _speaks(reader, writer, [whole, dies_late])

    server = await asyncio.start_server(serve, "127.0.0.1")
    origin = Origin("http", "127.0.0.1", server.sockets[0].getsockname()[1])
    pool = Pool()
    await pool.fetch(origin, Request("POST", "/"), timeout_s=5)

    with pytest.raises(BrokenError, match="without an answer"):
        await pool.fetch(origin, Request("POST", "/"), timeout_s=5)

    assert len(met) == 1
    await pool.close()
    server.close()


@pytest.mark.parametrize("path", ["/health", "/metrics", "/ui", "/v1/other", "/nowhere"])
async def test_nothing_stays_of_what_was_no_turn(bench_for, path):
    """Probes and scrapes come for months."""
    bench = await bench_for("1R")

    for _ in range(20):
        await exchanged(bench.router.url, b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    gc.collect()

    kept = [thing for thing in gc.get_objects() if isinstance(thing, ReplayTransport)]
    assert len(kept) < 5
