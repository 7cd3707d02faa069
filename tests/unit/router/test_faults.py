"""What the client and the nodes see when something breaks."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from ppdbench.http.errors import ConnectError, OutOfFilesError
from ppdbench.http.messages import Request
from ppdbench.router.config import HealthRule, Timeouts
from ppdbench.router.turns import TurnInFlight
from ppdbench.testing.fake import Fault, FaultKind, Service

USER = [{"role": "user", "content": "hello there, how are you today?"}]
SLOW = Service(first_token_s=0.02, per_token_s=0.02)


def faulty(name: str, fault: Fault, **options):
    """Engine options: ``fault`` for every request to ``name``."""
    return lambda node: options | ({"faults": lambda _: fault} if node == name else {})


async def until(condition, limit_s: float = 3.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_what_p_refuses_reaches_the_client_as_p_said_it(bench_for, status):
    """A client gets P's status and body, not a 200 and not a 500 of our own."""
    engine = faulty("p0", Fault(FaultKind.STATUS, status=status))
    bench = await bench_for("1P_1D", policy="remote", engine=engine)

    reply = await bench.chat(USER, stream=True)

    assert reply.status == status
    assert reply.json()["error"]["message"] == "scripted failure"
    assert not bench.engines["d0"].served


@pytest.mark.parametrize("fault", [Fault(FaultKind.CLOSE), Fault(FaultKind.STATUS, status=503)])
async def test_a_p_that_breaks_is_replaced_by_another_once(bench_for, fault):
    """A 5xx or a closed connection of one P is tried on another before anything was sent."""
    bench = await bench_for("2P_1D", policy="remote", engine=faulty("p0", fault))

    reply = await bench.chat(USER)

    assert reply.status == 200
    assert len(bench.engines["p1"].served) == 1
    assert bench.total("retries") == 1


@pytest.mark.parametrize("fault", [Fault(FaultKind.CLOSE), Fault(FaultKind.STATUS, status=503)])
async def test_a_p_that_breaks_alone_is_replaced_by_an_r(bench_for, fault):
    """In a hybrid a replica can compute what no P is left for."""
    bench = await bench_for("1P_1D_1R", policy="remote", engine=faulty("p0", fault))

    reply = await bench.chat(USER)

    assert (reply.status, reply.node, reply.route) == (200, "r0", "replica")
    assert (reply.reason, bench.total("retries")) == ("retry", 1)
    assert not bench.engines["d0"].served


async def turns_before_and_after_p_died(bench):
    """Two of one conversation, the second of them once the router knows."""
    first = await bench.chat(USER)
    await bench.engines["p0"].close()
    await until(lambda: not bench.router.upstreams["p0"].alive)
    answer = {"role": "assistant", "content": first.text()}
    return first, await bench.chat([*USER, answer, {"role": "user", "content": "go on"}])


async def test_while_no_p_lives_an_r_serves_what_would_need_one(bench_for):
    """New conversations and later remote turns; the router is ready for them, and says so."""
    bench = await bench_for("1P_1D_1R", policy="remote", health=QUICK)
    at_d, later = await turns_before_and_after_p_died(bench)
    new = [await bench.chat([{"role": "user", "content": f"{at} {at}"}]) for at in range(4)]

    assert at_d.node == "d0"
    assert {(turn.status, turn.node, turn.route) for turn in [later, *new]} == {
        (200, "r0", "replica")
    }
    assert (await bench.get("/ready")).status == 200


async def test_while_no_p_lives_turns_that_need_none_stay_where_their_kv_is(bench_for):
    """A later local turn has no use for a P."""
    bench = await bench_for("1P_1D_1R", policy="local", health=QUICK)
    _, later = await turns_before_and_after_p_died(bench)

    assert (later.node, later.route) == ("d0", "local")


async def test_a_p_that_closes_and_stands_alone_is_a_502(bench_for):
    """There is nobody else to ask, and the client is told who broke."""
    bench = await bench_for("1P_1D", policy="remote", engine=faulty("p0", Fault(FaultKind.CLOSE)))

    reply = await bench.chat(USER)

    assert reply.status == 502
    assert "p0" in reply.json()["error"]["message"]
    assert bench.total("prefill_tokens:p0") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_d_that_dies_before_the_first_byte_is_replaced(bench_for, stream):
    """One retry elsewhere, whole, and P's first hand-off is released."""
    bench = await bench_for("1P_2D", policy="remote", engine=faulty("d0", Fault(FaultKind.CLOSE)))

    reply = await bench.chat(USER, stream=stream)

    assert (reply.status, reply.node) == (200, "d1")
    assert len(bench.engines["d1"].served) == 1
    await until(lambda: not bench.engines["p0"].held)


async def test_where_a_later_turn_is_tried_again_all_of_it_is_new(bench_for):
    """The receipt tells what the home that served it held, which is nothing."""
    dies = []
    faults = {"faults": lambda _: Fault(FaultKind.CLOSE) if dies else None}
    bench = await bench_for("1P_2D", engine=lambda name: faults if name == "d0" else {})
    first = await bench.chat(USER)
    dies.append("d0")

    await bench.chat([*USER, {"role": "assistant", "content": first.text()}, *USER])

    receipt = (await bench.get("/ppd/decisions")).json()["decisions"][0]
    assert (receipt["node"], receipt["reason"], receipt["context_tokens"]) == ("d1", "retry", 0)
    assert receipt["new_tokens"] > first.json()["usage"]["total_tokens"]


async def test_a_replica_that_dies_before_the_first_byte_is_replaced_and_the_receipt_says_so(
    bench_for,
):
    """As for a D: without it nobody could count how many turns were computed twice."""
    bench = await bench_for("2R", engine=faulty("r0", Fault(FaultKind.CLOSE)))

    reply = await bench.chat(USER)

    assert (reply.status, reply.node, reply.route, reply.reason) == (200, "r1", "replica", "retry")


async def test_a_d_that_dies_in_a_stream_gives_an_error_event_and_no_second_text(bench_for):
    """After the first byte nothing is tried again: the text so far, then an explicit error."""
    engine = faulty("d0", Fault(FaultKind.BREAK, after_tokens=3), service=SLOW)
    bench = await bench_for("1P_2D", policy="remote", engine=engine)

    reply = await bench.chat(USER, stream=True)

    assert reply.status == 200
    events = reply.events()
    assert events[-1]["error"]["code"] == 502
    assert sum(1 for event in events if event.get("choices")) <= 4
    assert b"[DONE]" not in reply.body
    assert not bench.engines["d1"].served


async def test_a_client_that_leaves_cancels_the_stream_at_d(bench_for):
    """D sees the cancel, and the gauges return to zero."""
    bench = await bench_for("1P_1D", policy="remote", engine=lambda _: {"service": SLOW})

    await leave_after(bench, 0.15)

    await until(lambda: bench.engines["d0"].cancelled == 1)
    await until(lambda: bench.total("in_flight") == 0)
    assert bench.total("running:d0") == 0
    assert bench.total("outcome:client_gone") == 1


async def test_a_client_that_leaves_in_the_prefill_cancels_p(bench_for):
    """P is not made to finish for nobody, and D is never asked."""
    slow_p = Service(first_token_s=5.0)
    engine = lambda node: {"service": slow_p} if node == "p0" else {}  # noqa: E731
    bench = await bench_for("1P_1D", policy="remote", engine=engine)

    await leave_after(bench, 0.1)

    await until(lambda: bench.engines["p0"].cancelled == 1)
    assert bench.total("prefill_tokens:p0") == 0
    assert not bench.engines["p0"].held


async def test_a_client_that_leaves_before_ds_first_byte_leaves_no_block_at_p(bench_for):
    """D hangs with the hand-off: it is cancelled, and P hears that nobody will come."""
    bench = await bench_for("1P_1D", policy="remote", engine=faulty("d0", Fault(FaultKind.HANG)))

    await leave_after(bench, 0.15)

    await until(lambda: bench.total("releases") == 1)
    await until(lambda: not bench.engines["p0"].held)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
@pytest.mark.parametrize("topology", ["1P_1D", "1P_2D"])
async def test_a_d_that_refuses_leaves_no_block_at_p(bench_for, status, topology):
    """A gateway or a full queue before D says nothing to P; the router does."""
    fault = Fault(FaultKind.STATUS, status=status)
    bench = await bench_for(topology, policy="remote", engine=faulty("d0", fault))

    reply = await bench.chat(USER)

    assert (reply.status, reply.node) == (status, "d0")
    await until(lambda: not bench.engines["p0"].held)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.STATUS])
async def test_blocks_are_released_by_a_home_that_works(bench_for, kind, monkeypatch):
    """The one that failed may be in no state to tell P."""
    asked = []
    release = TurnInFlight._release

    def noted(turn, node):
        asked.append(node.name)
        release(turn, node)

    monkeypatch.setattr(TurnInFlight, "_release", noted)
    limits = Timeouts(first_byte_s=0.1)
    options = {"policy": "remote", "engine": faulty("d0", Fault(kind)), "timeouts": limits}
    bench = await bench_for("1P_2D", **options)

    await bench.chat(USER)

    assert asked == ["d1"]
    await until(lambda: not bench.engines["p0"].held)


async def test_a_client_that_says_no_more_has_left(bench_for):
    """The FIN of ``shutdown()`` is that of ``close()``: waiting to see which would keep P busy."""
    engine = lambda _: {"service": Service(first_token_s=5.0)}  # noqa: E731
    bench = await bench_for("1P_1D", policy="remote", engine=engine)

    reader, writer = await send_chat(bench)
    await until(lambda: bench.engines["p0"].running == 1)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 3)
    await until(lambda: bench.engines["p0"].cancelled == 1)
    writer.close()

    assert answer == b""
    assert bench.total("in_flight") == 0


async def leave_after(bench, seconds: float) -> None:
    """Send a streamed chat and close the connection after ``seconds``."""
    _, writer = await send_chat(bench)
    await asyncio.sleep(seconds)
    writer.transport.abort()


async def send_chat(bench):
    """A streamed chat on a connection of its own."""
    body = {"model": "fake", "messages": USER, "max_tokens": 200, "stream": True}
    wire = Request.json("/v1/chat/completions", body).render(bench.origin)
    reader, writer = await asyncio.open_connection(bench.origin.host, bench.origin.port)
    writer.write(wire)
    return reader, writer


async def test_a_node_that_never_answers_times_out(bench_for):
    """The phase's limit ends the turn with 504."""
    bench = await bench_for(
        "1P_1D",
        policy="remote",
        engine=faulty("d0", Fault(FaultKind.HANG)),
        timeouts=Timeouts(first_byte_s=0.2),
    )

    reply = await bench.chat(USER)

    assert reply.status == 504
    assert bench.total("outcome:timeout") == 1


async def test_more_in_flight_than_allowed_is_429_with_retry_after(bench_for):
    """The cap holds and says when to come back."""
    engine = lambda _: {"service": Service(first_token_s=0.5)}  # noqa: E731
    bench = await bench_for("1R", policy="remote", engine=engine, max_in_flight=2)

    replies = await asyncio.gather(*(bench.chat(USER) for _ in range(5)))

    refused = [reply for reply in replies if reply.status == 429]
    assert len(refused) == 3
    assert refused[0].header("retry-after") == "1"


async def test_a_body_over_the_limit_is_413(bench_for):
    """And the engine never sees it."""
    bench = await bench_for("1R", max_body_bytes=1000)

    reply = await bench.chat([{"role": "user", "content": "x" * 5000}])

    assert reply.status == 413
    assert not bench.engines["r0"].served


async def test_endless_headers_are_431(bench_for):
    """A head has a limit too, and nothing behind it is served."""
    bench = await bench_for("1R")
    origin = bench.origin
    reader, writer = await asyncio.open_connection(origin.host, origin.port)
    writer.write(b"GET /health HTTP/1.1\r\n" + b"x: %b\r\n" % (b"y" * 1000) * 100 + b"\r\n")
    raw = await asyncio.wait_for(reader.read(), 5)
    writer.close()

    assert raw.startswith(b"HTTP/1.1 431")
    assert raw.count(b"HTTP/1.1") == 1


async def test_pipelined_requests_are_answered_in_order(bench_for):
    """Far more than may wait at once, none lost, none out of turn."""
    bench = await bench_for("1R")
    count = 100
    asked = [
        Request.json("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 1 + at % 7})
        for at in range(count)
    ]
    reader, writer = await asyncio.open_connection(bench.origin.host, bench.origin.port)
    writer.write(b"".join(request.render(bench.origin) for request in asked))
    counts = []
    for _ in range(count):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        counts.append(body["usage"]["completion_tokens"])
    writer.close()

    assert counts == [1 + at % 7 for at in range(count)]


QUICK = HealthRule(every_s=0.02, timeout_s=0.2, down_after=2, up_after=2)


async def test_a_dead_home_makes_its_conversations_cold(bench_for):
    """The holder is gone: the next turn goes remote to another D, and says why."""
    bench = await bench_for("1P_2D", policy="local", health=QUICK)
    first = await bench.chat(USER)
    await bench.engines[first.node].close()
    await until(lambda: not bench.router.upstreams[first.node].alive)

    second = await bench.chat(
        [
            *USER,
            {"role": "assistant", "content": first.text()},
            {"role": "user", "content": "go on"},
        ]
    )

    assert (second.status, second.route, second.reason) == (200, "remote", "cold")
    assert second.node != first.node


async def test_a_node_that_came_back_has_lost_its_kv(bench_for):
    """Out after N failures, in after M good answers; what it held is cold."""
    bench = await bench_for("1P_1D", policy="local", health=QUICK)
    first = await bench.chat(USER)
    home = bench.router.upstreams["d0"]
    engine = bench.engines["d0"]
    await engine._shell._server.close()
    await until(lambda: not home.alive)
    assert (await bench.chat(USER)).status == 503
    await engine._shell.start()
    await until(lambda: home.alive)

    second = await bench.chat(
        [
            *USER,
            {"role": "assistant", "content": first.text()},
            {"role": "user", "content": "go on"},
        ]
    )

    assert (second.route, second.reason) == ("remote", "cold")


async def test_models_and_readiness_with_a_node_down(bench_for):
    """/v1/models comes from any node; /ready needs a P and a home, or an R."""
    bench = await bench_for("1P_2D", health=QUICK)
    await bench.engines["p0"].close()
    await until(lambda: not bench.router.upstreams["p0"].alive)

    assert (await bench.get("/v1/models")).status == 200
    assert (await bench.get("/ready")).status == 503
    assert (await bench.get("/health")).status == 200


async def test_what_passes_through_goes_by_nodes_that_refuse_connections(bench_for):
    """They are out at once, as for turns: else each request failed until a health check came."""
    bench = await bench_for("3R", policy="roles")
    for name in ("r0", "r1"):
        await bench.engines[name].close()
    bench.engines["r2"]._shell._routes["/v1/embeddings"] = lambda _, reply: reply.send(200, b"{}")

    reply = await bench.post("/v1/embeddings", {"input": "x"})

    assert (reply.status, reply.body) == (200, b"{}")
    assert [node.alive for node in bench.router.upstreams.homes] == [False, False, True]


async def test_what_passes_through_where_nobody_listens_is_501(bench_for):
    """The search ends with the last node."""
    bench = await bench_for("2R", policy="roles")
    for engine in bench.engines.values():
        await engine.close()

    reply = await bench.post("/v1/embeddings", {"input": "x"})

    assert reply.status == 501


async def test_the_log_says_when_and_why_a_node_goes_and_when_it_is_back(bench_for, caplog):
    """Once each: a 503 for want of a node is explained nowhere else."""
    rule = HealthRule(every_s=0.02, timeout_s=0.5, down_after=2)
    bench = await bench_for("2R", health=rule)
    node, engine = bench.router.upstreams["r1"], bench.engines["r1"]
    well = engine._shell._routes["/health"]

    route(bench, "/health", lambda _, reply: reply.send(500, b""))
    bench.engines["r0"]._shell._routes["/health"] = well
    await until(lambda: not node.alive)
    await asyncio.sleep(0.1)
    route(bench, "/health", well)
    await until(lambda: node.alive)

    assert [record.message for record in caplog.records] == [
        "r1 is out: /health answers 500",
        "r1 is back",
    ]


async def test_a_busy_node_that_is_slow_to_answer_health_stays_in(bench_for):
    """Progress on its streams counts for more than a late /health."""
    rule = HealthRule(every_s=0.02, timeout_s=0.05, down_after=2, up_after=2)
    bench = await bench_for("1R", health=rule, engine=lambda _: {"service": SLOW})
    shell = bench.engines["r0"]._shell
    shell._routes["/health"] = lambda *_: None

    reply = await bench.chat(USER, stream=True, max_tokens=30)

    assert reply.status == 200
    assert bench.router.upstreams["r0"].alive
    await until(lambda: not bench.router.upstreams["r0"].alive)


async def test_a_router_out_of_files_blames_no_node(bench_for):
    """Else all of them would seem dead until their health checks are good again."""
    bench = await bench_for("1R")
    node, health = bench.router.upstreams["r0"], bench.router.services.health

    for _ in range(3):
        health.failed(node, OutOfFilesError("no file left"))
    kept = node.alive
    health.failed(node, ConnectError("refused"))

    assert (kept, node.alive) == (True, False)


async def test_client_keys_are_asked_for_and_do_not_travel_on(bench_for):
    """Without a key 401; with one the engine never sees it; probes need none."""
    bench = await bench_for("1R", client_keys=("secret-1", "secret-2"))

    denied = await bench.chat(USER)
    allowed = await bench.chat(USER, headers={"authorization": "Bearer secret-2"})

    assert denied.status == 401
    assert allowed.status == 200
    assert (await bench.get("/metrics")).status == 401
    assert (await bench.get("/health")).status == 200


@pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
async def test_a_scheme_is_written_in_any_case(bench_for, scheme):
    """As HTTP says and vLLM reads it; another scheme opens nothing."""
    bench = await bench_for("1R", client_keys=("secret",))

    allowed = await bench.chat(USER, headers={"authorization": f"{scheme} secret"})
    denied = await bench.chat(USER, headers={"authorization": "Basic secret"})

    assert (allowed.status, denied.status) == (200, 401)


async def test_unknown_paths_under_v1_pass_to_a_node_or_say_so(bench_for):
    """The engine's own 404 comes back; a path outside /v1 is ours."""
    bench = await bench_for("1P_1D")

    reply = await bench.post("/v1/embeddings", {"input": "x"})

    assert reply.status == 404
    assert reply.json() == {"detail": "Not Found"}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/version", "/v1/responses"])
async def test_what_only_a_node_can_answer_passes_to_one(bench_for, path):
    """Query, body, status and headers, unchanged; compressed requests too."""
    bench = await bench_for("1P_1D")
    route(bench, path, lambda incoming, reply: reply.send(203, incoming.body, ((b"x-a", b"b"),)))

    answer = await bench.pool.fetch(
        bench.origin,
        Request("POST", f"{path}?a=b", ((b"content-encoding", b"gzip"),), b"\x1f\x8bany"),
        timeout_s=5,
    )

    assert (answer.head.status, answer.body) == (203, b"\x1f\x8bany")
    assert answer.head.get(b"x-a") == b"b"


async def test_a_stream_that_is_no_turn_stays_a_stream(bench_for):
    """The first event is there before the node has written the second."""
    bench = await bench_for("1P_1D")
    opened = []

    def answer(_, responder):
        responder.start(200, ((b"content-type", b"text/event-stream"),))
        responder.write(b"data: 1\n\n")
        opened.append(responder)

    route(bench, "/v1/responses", answer)
    reader, writer = await ask_raw(bench, b"/v1/responses")

    first = await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 5)
    opened[0].write(b"data: 2\n\n")
    opened[0].end()
    rest = await asyncio.wait_for(reader.read(), 5)
    writer.close()

    assert b"text/event-stream" in first
    assert b"data: 2\n\n" in rest
    assert rest.endswith(b"0\r\n\r\n")


async def test_a_stream_that_is_no_turn_breaks_off_where_its_node_does(bench_for):
    """No end is made up, and a client that leaves is a node's client that leaves."""
    bench = await bench_for("1P_1D")
    opened = []

    def answer(_, responder):
        responder.start(200)
        responder.write(b"some")
        opened.append(responder)

    route(bench, "/v1/responses", answer)
    reader, writer = await ask_raw(bench, b"/v1/responses")
    await asyncio.wait_for(reader.readuntil(b"some"), 5)
    opened[0].abort()
    rest = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    reader, writer = await ask_raw(bench, b"/v1/responses")
    await asyncio.wait_for(reader.readuntil(b"some"), 5)
    writer.close()

    assert not rest.endswith(b"0\r\n\r\n")
    await until(lambda: opened[1].gone)


async def test_a_node_that_stalls_in_what_is_no_turn_holds_it_no_longer_than_a_turn(bench_for):
    """The answer breaks off, as it would had the node closed, and nothing stays in flight."""
    bench = await bench_for("1P_1D", timeouts=Timeouts(silence_s=0.3))

    def stall(_, responder):
        responder.start(200)
        responder.write(b"half")

    route(bench, "/v1/responses", stall)
    reader, writer = await ask_raw(bench, b"/v1/responses")
    rest = await asyncio.wait_for(reader.read(), 5)
    writer.close()

    assert b"half" in rest
    assert not rest.endswith(b"0\r\n\r\n")
    await until(lambda: bench.total("in_flight") == 0)


async def test_a_slow_reader_of_a_stream_that_is_no_turn_slows_the_node(bench_for):
    """Its bytes do not pile up in the router: the node feels a full connection, then goes on."""
    bench = await bench_for("1P_1D")
    piece, most, written, pouring = b"x" * 65_536, 1_000, [], []
    stopped = asyncio.Event()

    async def pour(responder):
        responder.start(200)
        while not responder.congested and len(written) < most:
            responder.write(piece)
            written.append(piece)
            await asyncio.sleep(0)
        stopped.set()
        while responder.congested:  # noqa: ASYNC110  (until the client reads)
            await asyncio.sleep(0.005)
        responder.end(b"the end")

    route(bench, "/v1/responses", lambda _, reply: pouring.append(asyncio.create_task(pour(reply))))
    reader, writer = await ask_raw(bench, b"/v1/responses")
    await asyncio.wait_for(stopped.wait(), 20)
    rest = await asyncio.wait_for(reader.read(), 20)
    writer.close()

    assert 1 < len(written) < most
    assert rest.count(b"x") >= len(written) * len(piece)
    assert b"the end" in rest


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", b"405"), ("/v1/models", b"200")])
async def test_a_head_request_waits_for_no_body(bench_for, path, status):
    """A node's answer to one has a length and no body; its models are asked for by GET."""
    bench = await bench_for("1P_1D")
    models = bench.engines["d0"]._shell._models

    def answer(incoming, responder):
        if incoming.method == "GET":
            models(incoming, responder)
        else:
            responder.pass_on(b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 31\r\n\r\n")

    route(bench, path, answer)
    reader, writer = await asyncio.open_connection(bench.origin.host, bench.origin.port)
    writer.write(b"HEAD %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    head = await asyncio.wait_for(reader.read(), 5)
    writer.close()

    assert head.startswith(b"HTTP/1.1 " + status)
    assert head.endswith(b"\r\n\r\n")


def route(bench, path, answer):
    for engine in bench.engines.values():
        engine._shell._routes[path] = answer


async def ask_raw(bench, path):
    reader, writer = await asyncio.open_connection(bench.origin.host, bench.origin.port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % path)
    return reader, writer


async def test_a_compressed_turn_is_told_to_come_plain(bench_for):
    """No engine reads one either; the client learns what to change."""
    bench = await bench_for("1P_1D")
    headers = ((b"content-encoding", b"gzip"),)

    answer = await bench.pool.fetch(
        bench.origin, Request("POST", "/v1/completions", headers, b"\x1f\x8bany"), timeout_s=5
    )

    assert answer.head.status == 415
    assert b"encoded as gzip; send it plain" in answer.body


async def test_a_clients_own_hand_off_parameters_never_reach_a_node(bench_for):
    """A client could otherwise make a node read from any host."""
    seen = []
    bench = await bench_for("1R", engine=lambda _: {"faults": seen.append})

    await bench.chat(USER, kv_transfer_params={"remote_host": "example.invalid"})

    assert seen[0].kv_transfer_params is None


async def test_at_the_end_of_a_drain_each_client_hears_why(bench_for):
    """503 before the first byte, an error event behind it, and P's blocks are given back."""
    slow = lambda asked: Service(0.0 if asked.stream else 30.0, 30.0)  # noqa: E731
    engine = lambda name: {"service": slow} if name == "d0" else {}  # noqa: E731
    bench = await bench_for("1P_1D", policy="remote", engine=engine, drain_s=0.2)
    asked = [asyncio.create_task(bench.chat(USER, stream=stream)) for stream in (False, True)]
    await until(lambda: bench.engines["d0"].running == 2)

    await bench.router.drain()
    whole, stream = await asyncio.gather(*asked)

    assert (whole.status, whole.json()["error"]["code"]) == (503, 503)
    assert "shutting down" in whole.json()["error"]["message"]
    assert (stream.status, stream.events()[-1]["error"]["code"]) == (200, 503)
    assert b"[DONE]" not in stream.body
    await until(lambda: bench.total("in_flight") == 0 and not bench.engines["p0"].held)


async def test_draining_finishes_what_runs_and_takes_nothing_new(bench_for):
    """SIGTERM's way out: open turns end, a new one on an open connection gets 503."""
    engine = lambda _: {"service": Service(first_token_s=0.3)}  # noqa: E731
    bench = await bench_for("1R", engine=engine)
    running = asyncio.create_task(bench.chat(USER))
    await until(lambda: bench.total("in_flight") == 1)

    await asyncio.gather(bench.router.drain(), _late(bench))

    assert (await running).status == 200
    assert bench.total("in_flight") == 0


async def _late(bench) -> None:
    await asyncio.sleep(0.05)
    with pytest.raises(Exception, match="connect"):
        await bench.chat(USER)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"messages": 5}', b"{}"])
async def test_bodies_that_are_none_get_a_400(bench_for, raw):
    """Ours or the engine's, never a 500."""
    bench = await bench_for("1P_1D", policy="remote")
    request = Request("POST", "/v1/chat/completions", (), raw)

    answer = await bench.pool.fetch(bench.origin, request, timeout_s=5)

    assert answer.head.status == 400
    assert "error" in orjson.loads(answer.body)
