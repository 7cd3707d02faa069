"""What a request costs the router in Python: its own code alone, with neither kernel nor client."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import os
import pstats
import statistics
import sys
from itertools import product
from time import process_time
from types import SimpleNamespace

import orjson
import pytest

from ppdbench.cluster.contract import cluster_from_options
from ppdbench.router.config import HealthRule, RouterConfig
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer
from ppdbench.router.worker import Router
from ppdbench.table.schema import AXES, Cell, Table, save_table
from ppdbench.table.score import STATISTICS, Choice, Rule, Side

CLIENTS = 8
CONVERSATIONS = 64
ROUNDS = 25
REQUESTS_PER_ROUND = 2048
USAGE = {"prompt_tokens": 40, "completion_tokens": 4, "total_tokens": 44,
         "prompt_tokens_details": {"cached_tokens": 32}}  # fmt: skip
MESSAGE = {"role": "assistant", "content": "a short answer"}
WHOLE = {
    "id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "fake", "usage": USAGE,
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
}  # fmt: skip


class Wire(asyncio.Transport):
    """A connection in memory: it keeps what was last written to it and says so in ``told``."""

    def __init__(self, protocol, told):
        super().__init__()
        self.protocol, self._told = protocol, told
        self.data = b""
        protocol.connection_made(self)

    def write(self, data):
        self.data = data
        self._told.append(self)

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        self.protocol.connection_lost(None)


class InMemory(asyncio.SelectorEventLoop):
    """A loop whose servers and clients meet no kernel. ``asked`` are requests at engines."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.answered = []
        self.make_client = None

    async def create_server(self, factory, *_, **__):
        self.make_client = lambda: Wire(factory(), self.answered)
        sock = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))
        return SimpleNamespace(sockets=[sock], close=lambda: None)

    async def create_connection(self, factory, *_, **__):
        wire = Wire(factory(), self.asked)
        return wire, wire.protocol


def request(conversation, turn):
    messages = [{"role": "user", "content": f"conversation {conversation}: hello, what is it?"}]
    if turn > 1:
        messages += [MESSAGE, {"role": "user", "content": "and why is that so?"}]
    raw = orjson.dumps({"model": "fake", "messages": messages, "max_tokens": 32})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        "content-type: application/json\r\naccept: */*\r\nuser-agent: bench\r\n"
        f"x-session-id: {conversation}\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


HANDED = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine", "remote_request_id": "request", "remote_host": "127.0.0.1",
    "remote_port": 5600, "remote_num_tokens": 40, "tp_size": 1,
}  # fmt: skip


def answer(document):
    raw = orjson.dumps(document)
    lines = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(raw)
    return b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n" + raw


def always_local(path):
    tpot_s = dict.fromkeys(STATISTICS, 0.01)
    remote = Side(50, 1.0, dict.fromkeys(STATISTICS, 0.2), tpot_s, tpot_s)
    local = Side(50, 1.0, dict.fromkeys(STATISTICS, 0.05), tpot_s, tpot_s)
    centres = product((16, 1024, 16384), (4, 128, 1024), (4, 256), (0.25, 4.0, 64.0))
    cells = [
        Cell(topology="1P_2D", workload=f"w{at}", backend="sim", remote=remote, local=local,
             centre=dict(zip(AXES, centre, strict=True)))
        for at, centre in enumerate(centres)
    ]  # fmt: skip
    save_table(Table(Rule(undecided=Choice.LOCAL), {}, tuple(cells)), path)


def a_router(table):
    nodes = (f"{role}=http://127.0.0.1:{at}" for at, role in enumerate("PDD", 1))
    config = RouterConfig(
        cluster=cluster_from_options(nodes), policy=f"table:{table}", port=0,
        health=HealthRule(every_s=3600.0),
    )  # fmt: skip
    return Router(config, load_policy(config), Shared.over(make_buffer(config), config, 0))


def ask(loop, clients, requests):
    """One request per client, read whole before the first is answered, as one poll brings them."""
    for client, raw in zip(clients, requests, strict=True):
        client.protocol.data_received(raw)
    serve(loop)


def serve(loop):
    """Answer what engines were asked, with what P hands over where it was asked for that."""
    while loop.asked:
        engine = loop.asked.pop()
        prefill = b'"do_remote_decode":true' in engine.data
        engine.protocol.data_received(PREFILLED if prefill else ANSWERED)


ANSWERED = answer(WHOLE)
PREFILLED = answer(WHOLE | {"kv_transfer_params": HANDED})


async def connected(loop, clients):
    """One request each, with the loop's help, so that every connection to an engine is there."""
    for at, client in enumerate(clients):
        client.protocol.data_received(request(at, 1))
    until = loop.time() + 5
    while len(loop.answered) < len(clients) and loop.time() < until:
        await asyncio.sleep(0)
        serve(loop)


def one_round(loop, clients, wires):
    begun_s = process_time()
    for at in range(0, REQUESTS_PER_ROUND, CLIENTS):
        first = at % CONVERSATIONS
        ask(loop, clients, wires[first : first + CLIENTS])
    return (process_time() - begun_s) / REQUESTS_PER_ROUND


async def measured(table, profile):
    loop = asyncio.get_running_loop()
    async with a_router(table):
        clients = [loop.make_client() for _ in range(CLIENTS)]
        await connected(loop, clients)
        for turn in (1, 2):
            wires = [request(at, turn) for at in range(CONVERSATIONS)]
            one_round(loop, clients, wires)
        loop.answered.clear()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        costs = [one_round(loop, clients, wires) for _ in range(ROUNDS)]
        assert len(loop.answered) == ROUNDS * REQUESTS_PER_ROUND
        assert all(b"x-ppd-route: local" in client.data for client in clients)
        with profile:
            one_round(loop, clients, wires)
    return costs


@pytest.mark.benchmark
def test_a_short_chat_in_python(tmp_path, capsys):
    """Later turns of named chats over kept connections, table and receipts on.

    Processor time per request. With ``PPD_PROFILE=1`` also where it goes, by function.
    """
    always_local(tmp_path / "table.json")
    profile = cProfile.Profile()
    with asyncio.Runner(loop_factory=InMemory) as runner:
        costs = runner.run(measured(tmp_path / "table.json", profile))
    with capsys.disabled():
        stats = pstats.Stats(profile, stream=sys.stdout)
        middle, least = statistics.median(costs) * 1e6, min(costs) * 1e6
        calls = stats.total_calls / REQUESTS_PER_ROUND
        print(f"\nshort chat: {middle:.1f} µs median, {least:.1f} least; {calls:.0f} calls")
        if os.environ.get("PPD_PROFILE"):
            stats.sort_stats("tottime").print_stats("ppdbench", 70)
