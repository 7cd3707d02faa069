"""Clients and nodes that say what is legal and odd: an answer, gauges at 0, nothing that stops."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from ppdbench.cluster.contract import cluster_from_options
from ppdbench.cluster.nixl import prefill_body
from ppdbench.core.errors import UsageError
from ppdbench.http.client import Pool
from ppdbench.http.messages import Headers, Origin, Request
from ppdbench.http.server import Server
from ppdbench.router.board import ArrivalRate, Board
from ppdbench.router.config import HealthRule, RouterConfig, Timeouts
from ppdbench.router.documents import UnreadableError, without_hand_off
from ppdbench.router.health import Health
from ppdbench.router.nodes import Upstreams
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Layout, Shared, make_buffer
from ppdbench.router.worker import Router
from ppdbench.testing.fake import Fault, FaultKind

USER = [{"role": "user", "content": "hello there"}]
CHAT = "/v1/chat/completions"
FULL = Path("/dev/full")
DEEP = b"[" * 300 + b"]" * 300
HANDED = {"kv_transfer_params": {"do_remote_prefill": True}}
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "x"}}]}


class Rig:
    """A router before nodes that say what they are told to: ``says`` by role."""

    def __init__(self) -> None:
        self.says = {"P": orjson.dumps(HANDED), "D": orjson.dumps(ANSWER), "R": b"{}"}
        self.metrics = b""
        self.got: list[tuple[str, str, bytes]] = []
        self.stack = AsyncExitStack()

    async def start(self, *roles: str, **options) -> Rig:
        nodes = []
        for role in roles:
            node = await self.stack.enter_async_context(Server(self._node(role)))
            nodes.append(f"{role}={node.url}")
        options = {"health": HealthRule(every_s=3600.0), "max_notes": 1024} | options
        config = RouterConfig(
            cluster=cluster_from_options(nodes), policy="local", port=0, **options
        )
        shared = Shared.over(make_buffer(config), config, 0)
        self.router = Router(config, load_policy(config), shared)
        await self.stack.enter_async_context(self.router)
        self.pool = Pool()
        self.stack.push_async_callback(self.pool.close)
        return self

    def _node(self, role: str):
        def answer(incoming, responder):
            self.got.append((role, incoming.target, incoming.body))
            if self.says[role] is None:
                return  # it hangs
            body = self.metrics if incoming.path == "/metrics" else self.says[role]
            if callable(body) and incoming.method == "POST":
                body(responder)
                return
            body = b"" if callable(body) else body
            responder.send(200, body, ((b"content-type", b"application/json"),))

        return answer

    async def ask(self, method: str, path: str, body: bytes = b"", headers: Headers = ()):
        origin = Origin.parse(self.router.url)
        return await self.pool.fetch(origin, Request(method, path, headers, body), timeout_s=10)

    async def chat(self, **fields):
        return await self.ask("POST", CHAT, orjson.dumps({"messages": USER} | fields))

    async def connected(self):
        """A connection of one's own, to write on and to read from at leisure."""
        origin = Origin.parse(self.router.url)
        reader, writer = await asyncio.open_connection(origin.host, origin.port, limit=4096)
        self.stack.push_async_callback(writer.wait_closed)
        self.stack.callback(writer.close)
        return reader, writer

    async def until(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def is_calm(self) -> bool:
        """Nothing is in flight and every gauge is back."""
        nodes = self.router.upstreams.all
        taken = [gauge.total() for node in nodes for gauge in (node.running, node.prefill_tokens)]
        in_flight = self.router.services.metrics.in_flight.total()
        return not self.router.services.turns and in_flight == 0 and not any(taken)


@pytest.fixture
async def rig():
    rig = Rig()
    async with rig.stack:
        yield rig


@pytest.mark.parametrize("field", [b'"tools"', b'"chat_template_kwargs"', b'"messages"'])
async def test_what_is_nested_too_deeply_to_be_written_is_400(rig, field):
    """More levels can be read than written: the client hears of it and nothing stays taken."""
    await rig.start("P", "D")

    answer = await rig.ask("POST", CHAT, b'{"messages":["x"],%b:%b}' % (field, DEEP))

    assert answer.head.status == 400
    assert b"254" in answer.body
    assert rig.is_calm()


async def test_a_history_of_very_many_answers_is_served(rig):
    """A note counts turns in 16 bits."""
    await rig.start("P", "D")

    answer = await rig.chat(messages=[{"role": "assistant", "content": ""}] * 65_600 + USER)

    assert answer.head.status == 200
    assert rig.is_calm()


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1e30}},
        {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": "7"}},
        {"prompt_tokens": 2**31 - 1, "completion_tokens": 2**31 - 1},
        {"prompt_tokens": "five"},
        {"prompt_tokens": -1},
        {"prompt_tokens": 1.5},
        {"prompt_tokens": 2**40},
    ],
)
async def test_counts_that_are_none_are_unknown(rig, usage, tmp_path):
    """Of P and of D: the answer passes, receipt and log are written."""
    await rig.start("P", "D", decisions_log=tmp_path / "log")
    for role, body in (("P", HANDED), ("D", ANSWER)):
        rig.says[role] = orjson.dumps(body | {"usage": usage})

    answer = await rig.chat()

    assert answer.head.status == 200
    assert rig.is_calm()
    assert len((await rig.ask("GET", "/ppd/decisions")).json()["decisions"]) == 1
    assert len((tmp_path / "log").read_bytes().splitlines()) == 1


@pytest.mark.parametrize("ids", [["a"], [None], [2.5], [10**30]])
async def test_token_ids_that_are_none_are_no_history(rig, ids):
    """The answer passes as it is."""
    await rig.start("P", "D")
    rig.says["D"] = orjson.dumps({"choices": [{"text": "x", "token_ids": []}]})
    rig.says["D"] = rig.says["D"].replace(b"[]", str(ids).replace("'", '"').encode())

    answer = await rig.ask("POST", "/v1/completions", b'{"prompt":[1,2,3]}')

    assert answer.head.status == 200
    assert rig.is_calm()


async def test_hand_off_parameters_too_deep_to_be_written_are_a_502(rig):
    """P is named, and D is not asked."""
    await rig.start("P", "D")
    rig.says["P"] = b'{"kv_transfer_params":{"do_remote_prefill":true,"x":%b}}' % DEEP

    answer = await rig.chat()

    assert answer.head.status == 502
    assert b"p0" in answer.body
    assert rig.is_calm()


async def test_a_fault_of_our_own_ends_the_turn(rig, monkeypatch):
    """The client gets a 500 that says so, and no gauge keeps what the turn took."""
    await rig.start("P", "D")
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    monkeypatch.setattr(rig.router.services.chooser, "learn", lambda *_: 1 // 0)

    answer = await rig.chat()

    assert answer.head.status == 500
    assert rig.is_calm()
    assert [type(context["exception"]) for context in errors] == [ZeroDivisionError]


@pytest.mark.parametrize("told", [b"1.2.3", b"e", b"1e400", b"1e30", b"..."])
async def test_a_start_time_that_is_none_stops_no_health_check(rig, told):
    """The next round is asked as the last one was, and turns are noted."""
    rig.metrics = b"process_start_time_seconds " + told + b"\n"
    await rig.start("R", health=HealthRule(every_s=0.01))

    async with asyncio.timeout(5):
        while sum(path == "/metrics" for _, path, _ in rig.got) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    assert (await rig.chat()).head.status == 200
    assert rig.is_calm()


async def test_a_nodes_start_time_is_its_epoch(rig):
    """Asked at the address that the cluster file gives; a restart shows even when nobody saw it."""
    rig.metrics = b"process_start_time_seconds 1.7e+09\n"
    await rig.start("R")

    async with asyncio.timeout(5):
        while rig.router.upstreams.all[0].epoch != 1_700_000_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


LOST = ANSWER | {
    "usage": {
        "prompt_tokens": 400,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
}


@pytest.mark.parametrize("sign", ["a lost turn", "a broken connection"])
async def test_a_sign_of_a_restart_has_the_start_time_asked_at_once(rig, sign):
    """Not at the sixth health check from now: what else the home held is known to be gone."""
    rig.metrics, rig.says["D"] = b"process_start_time_seconds 1.7e+09\n", orjson.dumps(LOST)
    await rig.start("P", "D")
    home = rig.router.upstreams["d0"]
    await rig.until(lambda: home.epoch == 1_700_000_000)
    await rig.chat()
    rig.metrics = b"process_start_time_seconds 1.8e+09\n"
    if sign == "a broken connection":
        rig.says["D"] = lambda responder: responder.abort()

    reply = {"role": "assistant", "content": "x"}
    answer = await rig.chat(messages=[*USER, reply, *USER])

    assert answer.head.get(b"x-ppd-reason") == b"policy"
    await rig.until(lambda: home.epoch == 1_800_000_000)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/chat%2Fcompletions",
        "/v1/chat/%63ompletions",
        "http://any/v1/chat/completions",
        "/v1/chat/completions#x",
    ],
)
async def test_a_turn_is_a_turn_however_its_path_is_written(rig, target):
    """As nodes read it; else it would pass by identity, decision and the cap."""
    await rig.start("P", "D")

    answer = await rig.ask("POST", target, orjson.dumps({"messages": USER, **HANDED}))

    assert answer.head.get(b"x-ppd-reason") == b"turn1"
    assert [path[:8] for role, path, body in rig.got if role == "D" and body] == ["/v1/chat"]


async def test_what_passes_through_steers_no_hand_off(rig):
    """Engines read hand-off parameters from /v1/responses and /v1/messages too."""
    await rig.start("P", "D")

    await rig.ask("POST", "/v1/responses", orjson.dumps({"input": "x", **HANDED}))

    bodies = [body for _, path, body in rig.got if path == "/v1/responses"]
    assert list(map(orjson.loads, bodies)) == [{"input": "x"}]


@pytest.mark.parametrize("hangs", ["P", "D"])
async def test_models_are_told_by_a_node_that_answers(rig, hangs, caplog):
    """One that takes the request and says nothing keeps no client waiting."""
    rig.says[hangs] = None
    await rig.start("P", "D")

    answer = await rig.ask("GET", "/v1/models")

    assert answer.head.status == 200
    assert not caplog.records


@pytest.mark.parametrize("roles", [("P", "D"), ("R",)])
async def test_extra_arguments_steer_no_hand_off(rig, roles):
    """There, too, vLLM reads hand-off parameters, and one that is no object ends its scheduler."""
    await rig.start(*roles)

    answer = await rig.chat(vllm_xargs={"kv_transfer_params": "x", "other": 1})

    assert answer.head.status == 200
    sent = [orjson.loads(body) for _, path, body in rig.got if path == CHAT]
    assert [body["vllm_xargs"] for body in sent] == [{"other": 1}] * len(roles)


@pytest.mark.parametrize(
    "text",
    [
        '{"kv_transfer_params": {"a": 1}, "x": NaN}',
        '{"\\u006bv_transfer_params": 1, "x": 2}',
        '{"vllm_xargs": {"kv_transfer_params": "x", "y": 3}}',
        '{"vllm_xargs": {"\\u006bv_transfer_params": "x"}, "kv_transfer_params": 1}',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_a_field_is_found_as_an_engine_finds_it(text, encoding):
    """Escaped, beside a NaN, in another encoding, among vLLM's extra arguments."""
    left = without_hand_off(text.encode(encoding))

    assert b"v_transfer_params" not in left
    assert set(orjson.loads(left.replace(b"NaN", b"0"))) <= {"x", "vllm_xargs"}


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff\0", b"[]", b'{"a":1e2 }', b"[" * 100_000, b'{"a":"kv_transfer_params"}', b"\\u{"],
)
def test_what_has_no_such_field_stays_byte_for_byte(raw):
    """No JSON, or simply without it."""
    assert without_hand_off(raw) == raw


@pytest.mark.parametrize("hides", [b"[" * 5000 + b"]" * 5000, b"1" * 5000], ids=["deep", "long"])
async def test_what_only_an_engine_could_read_is_not_passed(rig, hides):
    """Its parser may have higher limits, and would find there what we could not."""
    await rig.start("R")
    body = b'{"kv_transfer_params":{"do_remote_prefill":true},"x":%b}' % hides

    answer = await rig.ask("POST", "/v1/responses", body)

    assert answer.head.status == 400
    assert not [path for _, path, _ in rig.got if path == "/v1/responses"]
    with pytest.raises(UnreadableError):
        without_hand_off(body)


async def test_a_release_does_not_hang_with_its_node_for_ever(rig):
    """Each turn that was given up there would leave a connection open."""
    rig.says["D"] = None
    health = HealthRule(every_s=3600.0, timeout_s=0.2)
    await rig.start("P", "D", timeouts=Timeouts(first_byte_s=0.2), health=health)
    pool = rig.router.upstreams["d0"].pool

    reply = await rig.chat()
    await rig.until(lambda: ("D", "/v1/completions") in [(role, path) for role, path, _ in rig.got])
    await rig.until(lambda: not any(connection._exchange for connection in pool._all))

    assert reply.head.status == 504


async def test_a_drain_waits_until_its_last_releases_are_answered(rig):
    """A home that loses the connection first may not have told P; the client has its 503 before."""
    told = []

    def answer_late(responder):
        told.append(True)
        responder.send(404, b"{}")

    def takes_its_time(responder):
        if b"release" in rig.got[-1][2]:
            asyncio.get_running_loop().call_later(0.3, answer_late, responder)

    rig.says["D"] = takes_its_time
    await rig.start("P", "D", drain_s=0.0)
    asked = asyncio.create_task(rig.chat())
    await rig.until(lambda: ("D", CHAT) in [(role, path) for role, path, _ in rig.got])

    await rig.router.drain()

    assert told
    assert (await asked).head.status == 503


PREFLIGHT = ((b"origin", b"http://page"), (b"access-control-request-method", b"POST"))


async def test_a_preflight_brings_no_key_and_is_a_nodes_to_answer(rig):
    """A browser asks before it may send one; what is allowed the nodes say, and nothing is ours."""
    await rig.start("R", client_keys=("secret",))

    asked = await rig.ask("OPTIONS", CHAT, headers=PREFLIGHT)
    ours = await rig.ask("OPTIONS", "/metrics", headers=PREFLIGHT)
    turn = await rig.ask("POST", CHAT, orjson.dumps({"messages": USER}), PREFLIGHT)

    assert (asked.head.status, asked.body) == (200, b"{}")
    assert (ours.head.status, turn.head.status) == (405, 401)
    assert [path for _, path, _ in rig.got if path.startswith("/v1")] == [CHAT]


@pytest.mark.parametrize(
    ("body", "headers"), [(b"", PREFLIGHT[:1]), (b"{}", PREFLIGHT)], ids=["no question", "a body"]
)
async def test_only_a_preflight_needs_no_key(rig, body, headers):
    """What no browser sends as one reaches no node."""
    await rig.start("R", client_keys=("secret",))

    answer = await rig.ask("OPTIONS", CHAT, body, headers)

    assert answer.head.status == 401
    assert not [path for _, path, _ in rig.got if path.startswith("/v1")]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here to stand for a full disk")
async def test_a_log_that_cannot_be_written_stops_no_turn(rig, caplog):
    """It is said once."""
    await rig.start("R", decisions_log=FULL)

    statuses = [(await rig.chat()).head.status for _ in range(3)]

    assert statuses == [200, 200, 200]
    assert sum("decisions log" in record.message for record in caplog.records) == 1


@contextmanager
def files_of_at_most(size_bytes):
    """As on a disk that is full then: the last write is cut there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_line_that_a_full_disk_cuts_spoils_no_other(rig, tmp_path):
    """The next one begins anew, so that each whole line is JSON."""
    path = tmp_path / "log"
    await rig.start("R", decisions_log=path)
    await rig.chat()
    size = path.stat().st_size
    with files_of_at_most(size + 20):
        await rig.chat()

    await rig.chat()

    first, cut, last = path.read_bytes().splitlines()
    assert len(cut) == 20
    assert [orjson.loads(line)["outcome"] for line in (first, last)] == ["ok", "ok"]


async def test_a_log_that_was_moved_away_is_begun_anew(rig, tmp_path):
    """As those do who rotate logs; nobody needs to tell the router."""
    path = tmp_path / "log"
    await rig.start("R", decisions_log=path)
    await rig.chat()

    size = path.stat().st_size
    with files_of_at_most(size + 20):
        await rig.chat()
    path.rename(tmp_path / "log.1")
    rig.router.services.receipts.share()
    await rig.chat()

    assert orjson.loads(path.read_bytes())["outcome"] == "ok"
    assert path.read_bytes().count(b"\n") == 1
    assert (tmp_path / "log.1").stat().st_size == size + 20


async def test_a_home_that_was_away_makes_up_for_nothing(rig):
    """Back again it gets its share of new conversations, not all of them."""
    await rig.start("R", "R")
    _, away = rig.router.upstreams.all
    away.alive = False
    for _ in range(20):
        await rig.chat()
    away.alive = True

    nodes = [(await rig.chat()).head.get(b"x-ppd-node") for _ in range(10)]

    assert nodes.count(b"r1") == 5


async def test_notes_that_had_to_go_are_counted(rig):
    """In the metrics and in the state, of all workers."""
    await rig.start("R", max_notes=8)
    for at in range(20):
        await rig.chat(messages=[{"role": "user", "content": f"question {at}"}])

    metrics = (await rig.ask("GET", "/metrics")).body
    state = (await rig.ask("GET", "/ppd/state")).json()

    assert b"ppd_evicted_total 32.0" in metrics
    assert state["memory"]["evicted"] == 32


@pytest.mark.parametrize("count", [2, 2.0, "2"])
async def test_several_answers_stay_on_one_node_when_that_is_tried_elsewhere(bench_for, count):
    """A second home computes them whole, too."""
    close = Fault(FaultKind.CLOSE)
    engine = lambda node: {"faults": lambda _: close} if node == "d0" else {}  # noqa: E731
    bench = await bench_for("1P_2D", policy="remote", engine=engine)

    reply = await bench.chat(USER, n=count)

    assert (reply.node, reply.reason) == ("d1", "alone")
    assert not bench.engines["p0"].served


def config_of(path: Path, *nodes: str, **options) -> RouterConfig:
    return RouterConfig(
        cluster=cluster_from_options(nodes), policy="local", state_file=path, **options
    )


def test_a_state_file_of_a_killed_router_has_nothing_in_flight(tmp_path):
    """Its gauges would count for ever against the cap."""
    config = config_of(tmp_path / "state", "R=http://127.0.0.1:1", workers=2, port=8000)
    killed = Shared.over(make_buffer(config), config, 1)
    killed.board.add("in_flight", 7)
    killed.board.add("running:r0", 50)

    board = Shared.over(make_buffer(config), config, 0).board

    assert (board.total("in_flight"), board.total("running:r0")) == (0, 0)


def test_a_state_file_does_not_carry_the_rate_over_the_time_in_which_nobody_counted(tmp_path):
    """Twelve in the first second after an hour's rest are twelve per second, not a fifth of one."""
    config = config_of(tmp_path / "state", "R=http://127.0.0.1:1")
    before = ArrivalRate(Shared.over(make_buffer(config), config, 0).board)
    before.count(1_000.0)

    rate = ArrivalRate(Shared.over(make_buffer(config), config, 0).board)
    for _ in range(12):
        rate.count(4_600.0)

    assert rate.per_s(4_600.5) == 12


@pytest.mark.parametrize("into_second", [0.0, 0.25, 0.75])
def test_a_steady_rate_is_told_as_it_is(tmp_path, into_second):
    """However much of the second that runs is over."""
    config = config_of(tmp_path / "state", "R=http://127.0.0.1:1")
    rate = ArrivalRate(Shared.over(make_buffer(config), config, 0).board)
    now_s = 1_100.0 + into_second
    for at in range(400):
        rate.count(now_s - 100 + (at + 0.5) / 4)

    assert rate.per_s(now_s) == 4


def test_a_worker_that_begins_after_the_clock_was_set_tells_the_time_of_the_others(monkeypatch):
    """Its notes would lie behind what the others know to be lost, and be cold for as long."""
    nodes = cluster_from_options(["P=http://127.0.0.1:1", "D=http://127.0.0.1:2"])
    config = RouterConfig(cluster=nodes, policy="local", workers=2, max_notes=64)
    buffer = make_buffer(config)
    first = Router(config, load_policy(config), Shared.over(buffer, config, 0))
    was_set_back_s = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: was_set_back_s)

    second = Router(config, load_policy(config), Shared.over(buffer, config, 1))

    assert second.services.clock_offset_s == first.services.clock_offset_s


def test_a_clock_that_was_set_back_brings_no_arrivals_of_the_future(tmp_path):
    """They would count until the clock has caught up."""
    config = config_of(tmp_path / "state", "R=http://127.0.0.1:1")
    before = ArrivalRate(Shared.over(make_buffer(config), config, 0).board)
    for second in range(60):
        before.count(4_600.0 + second)

    rate = ArrivalRate(Shared.over(make_buffer(config), config, 0).board)
    rate.count(1_000.0)

    assert rate.per_s(1_000.5) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_a_state_file_with_numbers_that_are_none_is_refused(tmp_path, value):
    """A node's epoch of NaN would be a 500 for every later turn."""
    config = config_of(tmp_path / "state", "P=http://127.0.0.1:1", "D=http://127.0.0.1:2")
    layout = Layout.of(config)
    board = Board(make_buffer(config), layout.board_at, layout.names, config.workers, 0)
    board.common("epoch:d0").put(value)

    with pytest.raises(UsageError, match="is damaged; remove it"):
        make_buffer(config)


@pytest.mark.parametrize(
    "other",
    [
        ["R=http://127.0.0.1:1", "R=http://127.0.0.1:2", "R=http://127.0.0.1:3"],
        ["R=http://127.0.0.1:2", "R=http://127.0.0.1:1"],
    ],
)
def test_a_state_file_of_other_nodes_is_refused(tmp_path, other):
    """More of them, or the same in another order: notes name nodes by their number."""
    config = config_of(tmp_path / "state", "R=http://127.0.0.1:1", "R=http://127.0.0.1:2")
    make_buffer(config)
    make_buffer(config)

    with pytest.raises(UsageError, match="other nodes"):
        make_buffer(replace(config, cluster=cluster_from_options(other)))


def test_more_notes_than_memory_is_one_sentence():
    """What to lower is said."""
    config = RouterConfig(
        cluster=cluster_from_options(["R=http://127.0.0.1:1"]), policy="local", max_notes=10**13
    )
    with pytest.raises(UsageError, match="--max-notes"):
        make_buffer(config)


def test_an_empty_host_is_refused():
    """It would listen on every address, where a variable of a script is not set."""
    with pytest.raises(UsageError, match="--host is empty"):
        RouterConfig(
            cluster=cluster_from_options(["R=http://127.0.0.1:1"]), policy="local", host=""
        )


def test_several_workers_share_a_port_that_has_a_number():
    """With port 0 each would take one of its own, and nobody would know them."""
    with pytest.raises(UsageError, match="--port 0"):
        RouterConfig(
            cluster=cluster_from_options(["R=http://127.0.0.1:1"]),
            policy="local",
            port=0,
            workers=2,
        )


STREAM = ((b"content-type", b"text/event-stream"),)
EVENT = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"x" * 1000)
DONE = b"data: [DONE]\n\n"
GIVEN_UP = b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason": "stop"}]}\n\n'


def wire(path: str, document: object, lines: bytes = b"") -> bytes:
    body = orjson.dumps(document)
    head = b"POST %b HTTP/1.1\r\nhost: any\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path.encode(), lines, len(body)) + body


async def test_a_drain_waits_for_a_slow_reader(rig):
    """Its answer is whole at the router long before it is whole at the client."""
    await rig.start("R", drain_s=10.0)
    rig.says["R"] = b"{}" + b" " * 20_000_000
    reader, writer = await rig.connected()
    writer.write(wire(CHAT, {"messages": USER}, b"connection: close\r\n"))
    await reader.readuntil(b"\r\n\r\n")
    stopping = asyncio.create_task(stopped(rig.router))
    await asyncio.sleep(0.2)

    assert len(await reader.read()) == 20_000_002
    await stopping


async def stopped(router: Router) -> None:
    await router.drain()
    await router.close()


async def test_a_stream_is_one_however_its_kind_is_written(rig):
    """Media types have no case; taken for an unstreamed answer it would come whole at its end."""

    def never_ends(responder):
        responder.start(200, ((b"content-type", b"Text/Event-Stream"),))
        responder.write(b'data: {"choices": []}\n\n')

    rig.says["R"] = never_ends
    await rig.start("R")
    reader, writer = await rig.connected()
    body = orjson.dumps({"messages": USER, "stream": True})
    lines = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    writer.write(lines % (CHAT.encode(), len(body)) + body)

    first = await asyncio.wait_for(reader.readuntil(b"}"), 5)

    assert b'{"choices": []}' in first


async def test_an_error_behind_a_part_of_a_long_event_is_an_event_of_its_own(rig):
    """Too long to be held back it was begun; what follows must not be read as the rest of it."""

    def dies(responder):
        responder.start(200, ((b"content-type", b"text/event-stream"),))
        responder.write(b"data: " + b"x" * 3_000_000)
        asyncio.get_running_loop().call_later(0.2, responder.abort)

    rig.says["R"] = dies
    await rig.start("R")

    answer = await rig.chat(stream=True)

    assert answer.body.endswith(b"}}\n\n")
    last = answer.body[:-2].rpartition(b"\n\n")[2]
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == 502


async def test_a_client_that_takes_nothing_is_no_fault_of_the_node(rig):
    """Its turn ends after the longest silence, and the client is told whose it was."""

    def endless(responder):
        responder.start(200, ((b"content-type", b"text/event-stream"),))
        for _ in range(100):
            responder.write(b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"x" * 100_000))

    rig.says["R"] = endless
    await rig.start("R", timeouts=Timeouts(silence_s=0.2))
    _, writer = await rig.connected()
    writer.transport.pause_reading()
    writer.write(
        Request.json(CHAT, {"messages": USER, "stream": True}).render(Origin.parse(rig.router.url))
    )

    board = rig.router.services.metrics.board
    async with asyncio.timeout(5):
        while not rig.is_calm() or not rig.got:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    ended = {name: board.total(f"outcome:{name}") for name in ("client_gone", "timeout")}
    assert ended == {"client_gone": 1, "timeout": 0}
    writer.transport.abort()


async def test_a_client_that_takes_nothing_of_what_is_no_turn_holds_no_place(rig):
    """The cap counts it, so it would refuse others for ever."""

    def endless(responder):
        responder.start(200, STREAM)
        for _ in range(100):
            responder.write(b"x" * 100_000)

    rig.says["R"] = endless
    await rig.start("R", timeouts=Timeouts(silence_s=0.2))
    _, writer = await rig.connected()
    writer.transport.pause_reading()
    writer.write(wire("/v1/responses", {"input": "x", "stream": True}))

    await rig.until(lambda: rig.got)
    await rig.until(rig.is_calm)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (
            {"continuous_usage_stats": True},
            {"include_usage": True, "continuous_usage_stats": False},
        ),
        ({"x": 1}, {"include_usage": True, "x": 1}),
        (None, {"include_usage": True}),
        ({"include_usage": True, "continuous_usage_stats": True},) * 2,
    ],
)
async def test_only_the_last_counts_are_asked_for_beside_a_client(rig, options, sent):
    """Counts in every event would reach a client that, without ``include_usage``, gets none."""
    await rig.start("R")

    await rig.chat(stream=True, stream_options=options)

    bodies = [orjson.loads(body) for _, path, body in rig.got if path == CHAT]
    assert [body["stream_options"] for body in bodies] == [sent]


async def test_a_drain_waits_for_what_is_no_turn(rig):
    """A streamed /v1/responses ends as it would have ended."""
    await rig.start("R", drain_s=10.0)
    loop = asyncio.get_running_loop()

    def slowly(responder):
        responder.start(200, STREAM, first=b"data: 1\n\n")
        loop.call_later(0.3, responder.end, b"data: 2\n\n")

    rig.says["R"] = slowly
    reader, writer = await rig.connected()
    writer.write(wire("/v1/responses", {"input": "x", "stream": True}))
    await reader.readuntil(b"data: 1")

    _, raw = await asyncio.gather(stopped(rig.router), reader.read())

    assert b"data: 2" in raw


@pytest.mark.parametrize(
    ("second", "end"),
    [
        (wire(CHAT, {"x": "y" * 3000}), b"HTTP/1.1 413"),
        (b"\0 no HTTP\r\n\r\n", b"HTTP/1.1 400"),
        (
            wire(CHAT, {"messages": []}, b"expect: 100-continue\r\nconnection: close\r\n"),
            b"HTTP/1.1 200",
        ),
    ],
)
async def test_what_is_said_of_a_second_request_stands_behind_the_first_answer(rig, second, end):
    """Inside a stream that runs it would be read as a part of that."""
    await rig.start("R", max_body_bytes=1000)
    loop = asyncio.get_running_loop()

    def slowly(responder):
        if len(rig.got) > 3:
            responder.send(200, b"{}")
            return
        responder.start(200, STREAM, first=EVENT)
        loop.call_later(0.2, responder.end, b"data: [DONE]\n\n")

    rig.says["R"] = slowly
    reader, writer = await rig.connected()
    writer.write(wire(CHAT, {"messages": USER, "stream": True}))
    await reader.readuntil(b'"choices"')
    writer.write(second)

    first, _, rest = (await reader.read()).partition(b"HTTP/1.1")

    assert first.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert (b"HTTP/1.1" + rest).startswith(end)
    assert rest.count(b"HTTP/1.1") == 0


async def test_an_error_inside_a_stream_is_no_good_outcome(bench_for):
    """The stream passes as it is; metrics and receipt say that it broke."""
    fault = Fault(FaultKind.ERROR_EVENT, after_tokens=2)
    bench = await bench_for("1R", engine=lambda _: {"faults": lambda _: fault})

    reply = await bench.chat(USER, stream=True)

    assert b"scripted failure" in reply.body
    assert (bench.total("outcome:broken"), bench.total("outcome:ok")) == (1, 0)


@pytest.mark.parametrize(("wish", "status"), [("remote", 200), ("pull", 400), ("replica", 400)])
async def test_a_client_chooses_remote_or_local_and_nothing_else(bench_for, wish, status):
    """An R can take no hand-off, so there the wish changes nothing."""
    bench = await bench_for("1R_1P_1D", policy="roles", allow_override=True)

    replies = [await bench.chat(USER, headers={"x_ppd_force_route": wish}) for _ in range(2)]

    assert [reply.status for reply in replies] == [status] * 2
    if status == 200:
        assert {reply.reason for reply in replies if reply.node == "r0"} == {"replica"}
        assert {reply.reason for reply in replies if reply.node == "d0"} == {"override"}


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        (b"", "broken"),
        (DONE, "ok"),
        (FINISH, "ok"),
        (FINISH + DONE, "ok"),
        (GIVEN_UP + DONE, "broken"),
        (GIVEN_UP + b": %b\n\n" % (b"x" * 20_000) + DONE, "broken"),
    ],
)
async def test_a_stream_that_just_stops_is_no_good_outcome(rig, ends, outcome):
    """Its bytes pass as they are, but only one that says it is over is counted, noted and learned.

    Some engines leave it at a finish reason; one that says it gave up is not over well.
    """
    await rig.start("P", "D")
    said = EVENT * 200 + ends
    rig.says["D"] = lambda responder: (responder.start(200, STREAM), responder.end(said))

    reply = await rig.chat(stream=True)

    board, receipts = rig.router.services.metrics.board, rig.router.services.receipts
    assert reply.body == said
    assert board.total(f"outcome:{outcome}") == 1
    assert receipts.latest(1)[0]["outcome"] == outcome
    assert bool(rig.router.services.chooser.memory.used()) == (outcome == "ok")


def breaking_behind(said, *, status=200, hangs=False):
    """A node that streams ``said`` and then, without a last chunk, closes or does nothing more."""

    def breaks(responder):
        responder.start(status, STREAM)
        responder.write(said)
        if not hangs:
            asyncio.get_running_loop().call_later(0.05, responder.abort)

    return breaks


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
async def test_a_node_that_breaks_behind_done_spoils_no_answer(rig, hangs, line_end):
    """The client has it whole; an error behind it would contradict what was noted and learned."""
    await rig.start("P", "D", timeouts=Timeouts(silence_s=0.3))
    said = (EVENT + FINISH + DONE).replace(b"\n", line_end)
    rig.says["D"] = breaking_behind(said, hangs=hangs)

    reply = await rig.chat(stream=True)

    assert reply.body == said
    assert rig.router.services.metrics.board.total("outcome:ok") == 1
    assert rig.is_calm()


async def test_a_node_that_always_breaks_behind_done_stays_in(rig):
    """Each of its answers was whole; three broken ones would take it out."""
    await rig.start("P", "D")
    rig.says["D"] = breaking_behind(EVENT + FINISH + DONE)

    assert [(await rig.chat(stream=True)).head.status for _ in range(5)] == [200] * 5
    assert rig.router.services.metrics.board.total("outcome:ok") == 5


async def test_an_error_status_that_breaks_behind_done_is_one(rig):
    """And P's blocks are released, as they are where the same answer ends well."""
    await rig.start("P", "D")
    rig.says["D"] = breaking_behind(EVENT + FINISH + DONE, status=500)

    reply = await rig.chat(stream=True)

    assert reply.head.status == 500
    assert rig.router.services.metrics.board.total("outcome:upstream_5xx") == 1
    assert rig.router.services.metrics.board.total("releases") == 1
    assert rig.router.services.metrics.board.total("outcome:ok") == 0


@pytest.mark.parametrize(("reason", "outcome"), [("abort", "broken"), ("length", "ok")])
async def test_an_unstreamed_answer_that_the_engine_gave_up_is_no_good_outcome(
    rig, reason, outcome
):
    """It comes with status 200, and the client gets it as it is."""
    choice = {**ANSWER["choices"][0], "finish_reason": reason}
    rig.says["D"] = orjson.dumps({"choices": [choice]})
    await rig.start("P", "D")

    reply = await rig.chat()

    assert reply.body == rig.says["D"]
    assert rig.router.services.metrics.board.total(f"outcome:{outcome}") == 1
    assert bool(rig.router.services.chooser.memory.used()) == (outcome == "ok")


async def test_progress_at_one_worker_counts_at_all():
    """A node too busy for /health whose streams another worker sees progress stays in."""
    asked = []
    async with Server(lambda _, responder: asked.append(responder)) as node:
        nodes = cluster_from_options([f"R={node.url}"])
        config = RouterConfig(cluster=nodes, policy="local", workers=2)
        buffer = make_buffer(config)
        boards = [Shared.over(buffer, config, worker).board for worker in range(2)]
        here, there = (Upstreams(nodes, board) for board in boards)
        rule = HealthRule(timeout_s=0.2, down_after=1)
        asking = asyncio.create_task(Health(here, rule).ask(here.all[0]))
        await asyncio.sleep(0.05)
        there.all[0].progress_at_s = time.monotonic()
        Health(there, rule).share_progress()
        await asking
        stayed = here.all[0].alive
        await Health(here, rule).ask(here.all[0])
        for pool in here.pools.values():
            await pool.close()

    assert (stayed, here.all[0].alive) == (True, False)


async def test_a_turn_is_noted_before_done_reaches_its_client(rig):
    """Clients stop to read there, and the last chunk of HTTP may come later."""
    await rig.start("P", "D")
    loop = asyncio.get_running_loop()

    def speaks(responder):
        responder.start(200, STREAM, first=EVENT + b"data: [DONE]\n\n")
        loop.call_later(0.3, responder.end)

    rig.says["D"] = speaks
    reader, writer = await rig.connected()
    writer.write(wire(CHAT, {"messages": USER, "stream": True}))
    await reader.readuntil(b"[DONE]")
    answer = {"role": "assistant", "content": "x" * 1000}
    rig.says["D"] = orjson.dumps(ANSWER)

    second = await rig.chat(messages=[*USER, answer, *USER])

    assert second.head.get(b"x-ppd-route") == b"local"
    await reader.readuntil(b"0\r\n\r\n")
    assert rig.is_calm()


@pytest.mark.parametrize("mark", ["progress_cell", "lost_s", "gone_s"])
async def test_an_instant_of_another_clock_counts_for_nothing(rig, tmp_path, mark):
    """A state file's may lie ahead: of another boot, or the wall clock was set back since.

    A hung node would stay in, or all turns be cold, until then.
    """
    await rig.start("R", state_file=tmp_path / "state")
    getattr(rig.router.upstreams.all[0], mark).put(1e12)
    config = rig.router.config
    await rig.router.close()

    again = Router(config, load_policy(config), Shared.over(make_buffer(config), config, 0))
    async with again:
        assert getattr(again.upstreams.all[0], mark).get() <= time.time()


async def test_hundreds_that_are_refused_at_once_wait_behind_a_turn(rig):
    """One read brings them all; each has its answer, and nothing stays in flight."""
    await rig.start("P", "D")
    reader, writer = await rig.connected()
    body = orjson.dumps({"messages": USER})
    turn = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
    count = 600

    writer.write(turn + b"POST /v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n" * count)
    async with asyncio.timeout(10):
        for _ in range(count):
            await reader.readuntil(b"HTTP/1.1 400 ")

    assert rig.is_calm()


@pytest.mark.parametrize("path", ["/health", "/v1/embeddings"])
async def test_a_client_of_http_1_0_gets_no_chunks_and_names_no_host(rig, path):
    """As a balancer's health check asks; what passes through comes as the node said it."""
    await rig.start("P", "D")
    reader, writer = await rig.connected()

    writer.write(b"GET %b HTTP/1.0\r\n\r\n" % path.encode())
    head, _, body = (await asyncio.wait_for(reader.read(-1), 5)).partition(b"\r\n\r\n")

    assert head.split(b" ")[1] == b"200"
    assert b"chunked" not in head.lower()
    assert body == (b"" if path == "/health" else rig.says["D"])


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_node_with_a_key_of_its_own_gets_that_alone(monkeypatch, path):
    """Clients always send some key; it is not the node's to see, nor a second one to refuse."""
    monkeypatch.setenv("KEY_OF_R", "of-the-node")
    seen = []

    def answer(incoming, responder):
        if incoming.method != "GET":  # which health checks are
            seen.append([value for name, value in incoming.headers if name == b"authorization"])
        responder.send(200, orjson.dumps(ANSWER), ((b"content-type", b"application/json"),))

    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(Server(answer))
        cluster = cluster_from_options([f"R={node.url}"])
        keyed = tuple(replace(one, api_key_env="KEY_OF_R") for one in cluster.nodes)
        cluster = replace(cluster, nodes=keyed)
        config = RouterConfig(cluster=cluster, policy="local", port=0, max_notes=1024)
        shared = Shared.over(make_buffer(config), config, 0)
        router = await stack.enter_async_context(Router(config, load_policy(config), shared))
        pool = Pool()
        stack.push_async_callback(pool.close)
        key = ((b"authorization", b"Bearer EMPTY"),)
        request = Request.json(path, {"messages": USER}, key)
        await pool.fetch(Origin.parse(router.url), request, timeout_s=5)
        preflight = Request("OPTIONS", path, key + PREFLIGHT)
        await pool.fetch(Origin.parse(router.url), preflight, timeout_s=5)

    assert seen == [[b"Bearer of-the-node"], []]
    shown = repr((request, config, router, router.upstreams.all))
    assert not [word for word in ("of-the-node", "EMPTY", "hello there") if word in shown]


async def test_a_pull_is_not_asked_for_again_when_its_home_broke(bench_for, monkeypatch):
    """What the broken D offered can no longer be read: P computes the retry itself."""
    pulls = []

    def spied(body, pull_from):
        pulls.append(pull_from is not None)
        return prefill_body(body, pull_from)

    monkeypatch.setattr("ppdbench.router.turns.prefill_body", spied)
    bench = await bench_for("1P_2D", policy="pull")
    body = {"model": "fake", "max_tokens": 24, "return_token_ids": True}
    prompt = list(range(100, 200))
    first = await bench.post("/v1/completions", body | {"prompt": prompt})
    longer = [*prompt, *first.json()["choices"][0]["token_ids"], 7, 8, 9]
    bench.engines[first.node]._faults = lambda _: Fault(FaultKind.CLOSE)

    second = await bench.post("/v1/completions", body | {"prompt": longer})

    assert (second.status, second.route, second.reason) == (200, "remote", "retry")
    assert pulls == [False, True, False]
