"""The measuring client held against what the engines say they really did."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from contextlib import contextmanager
from statistics import mean, median

import psutil
import pytest
import uvloop

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import Role, Topology
from ppdbench.load.conversation import Play
from ppdbench.load.driver import Driver
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.share import Task
from ppdbench.load.split import processes_for, run_split, split
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.parse import parse_policy
from ppdbench.sim.kernel import Kernel
from ppdbench.testing import FakeEngine, ScriptedCluster, Service

pytestmark = pytest.mark.slow

LIVE = LiveSettings(TurnSettings("fake"))


def play(spec, policy, arrivals, live=LIVE):
    return run_live_point(spec, parse_policy(policy), arrivals, 10.0, live, 1)


def singles(count, gap_s, out=1):
    return [Arrival(i * gap_s, Conversation(f"c{i}", (Turn(8, out),))) for i in range(count)]


@contextmanager
def fake_process(*options):
    """A FakeEngine that shares no core and no loop with the client."""
    command = [sys.executable, "-m", "ppdbench.testing", *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        try:
            yield ClusterSpec((Node("r0", Role.R, url),))
        finally:
            process.stdin.close()


def test_ttft_and_tpot_are_those_of_the_recorded_sends():
    """The engine notes when each chunk was given to the kernel; the client must see the same.

    Never less than the engine's own durations, and no more than what one loop that serves both
    sides takes: a millisecond at the median.
    """

    async def measure():
        script = Service(0.05, 0.012)
        async with ScriptedCluster("1R", lambda _: FakeEngine(service=script)) as cluster:
            outcome = await play(cluster.spec, "roles", singles(40, 0.05, out=12))
            return outcome.records, list(cluster.engines["r0"].served)

    records, served = uvloop.run(measure())
    served.sort(key=lambda s: s.received_at_s)
    ttft_added = [
        r.ttft_sent_s - (s.sent_at_s[0] - s.received_at_s)
        for r, s in zip(records, served, strict=True)
    ]
    tpot_added = [
        r.tpot_s - (s.sent_at_s[-1] - s.sent_at_s[0]) / 11
        for r, s in zip(records, served, strict=True)
    ]
    assert min(ttft_added) > 0
    assert median(ttft_added) < 0.001
    assert abs(median(tpot_added)) < 0.0002


def test_latency_behind_a_full_server_is_the_analytic_queue():
    """Ten requests a second through eight slots of 0.8 s, offered at twenty: an open loop waits.

    Request i begins at max(arrival, end of request i − 8); a closed loop or a cap in the client
    would hide the wait.
    """
    arrivals = singles(60, 0.05)

    async def measure():
        script = Service(0.8, 0.0)
        engine = FakeEngine(service=script, slots=8)
        async with ScriptedCluster("1R", lambda _: engine) as cluster:
            return (await play(cluster.spec, "roles", arrivals)).records

    records = uvloop.run(measure())
    slots = deque([0.0] * 8)
    wanted = []
    for arrival in arrivals:
        end_s = max(arrival.at_s, slots.popleft()) + 0.8
        slots.append(end_s)
        wanted.append(end_s - arrival.at_s)

    assert mean(r.e2e_s for r in records) == pytest.approx(mean(wanted), rel=0.05)
    assert records[-1].e2e_s == pytest.approx(wanted[-1], rel=0.05)


class HeapNodes:
    """A TurnServer on simulated time that follows a FakeEngine's script."""

    def __init__(self, kernel, script):
        self.kernel = kernel
        self.script = script

    def serve(self, dialogue, record, done):
        service = self.script(f"{record.conversation}/{record.turn}")
        record.first_token_at_s = self.kernel.now_s + service.first_token_s
        tokens = record.wanted_output_tokens
        record.finished_at_s = record.first_token_at_s + service.per_token_s * (tokens - 1)
        record.prompt_tokens = record.context_tokens + record.new_tokens
        record.output_tokens = tokens
        self.kernel.at(record.finished_at_s, lambda _: done(dialogue, record))


def script(name):
    """Service times by (conversation, turn), far enough apart to keep an order."""
    conversation, turn = name.split("/")
    return Service(0.03 + 0.007 * (int(conversation[1:]) % 5), 0.004 + 0.001 * int(turn))


def script_of(generation):
    """The same, for an engine that knows a turn by its request's header."""
    return script(dict(generation.headers)[b"x-ppd-turn"].decode())


@pytest.mark.parametrize(
    ("topology", "policy"),
    [("4R", "roles"), ("1P_1D_2pD", "roles"), ("2P_2D", "share:0.5"), ("1P_3D", "threshold:30")],
)
def test_the_wall_clock_and_the_event_heap_give_equal_records(topology, policy):
    """One state machine under both drivers: same turns, routes, nodes, counts, reasons, order.

    Instants differ by what a real hand-off and a real loop take; under P the turn is longer by
    P's own service, so times are compared where no P is asked.
    """
    arrivals = [
        Arrival(
            0.05 * i,
            Conversation(f"c{i}", (Turn(20, 6), Turn(25, 5, think_s=0.05), Turn(40, 4, 0.02))),
        )
        for i in range(12)
    ]

    async def on_wall_clock():
        async with ScriptedCluster(topology, lambda _: FakeEngine(service=script_of)) as cluster:
            return (await play(cluster.spec, policy, arrivals)).records

    def on_heap():
        kernel = Kernel()
        plan = Play(
            Topology.parse(topology),
            parse_policy(policy),
            10.0,
            running=lambda _: 0,
            outstanding=lambda _: 0.0,
        )
        Driver(kernel, HeapNodes(kernel, script), plan).start(arrivals)
        kernel.run()
        return plan.records

    wall, heap = uvloop.run(on_wall_clock()), on_heap()

    def facts(records):
        return sorted(
            (
                r.conversation, r.turn, r.route, r.node, r.context_tokens, r.new_tokens,
                r.prompt_tokens, r.output_tokens, r.outcome, r.reason, r.error,
            )
            for r in records
        )  # fmt: skip

    assert facts(wall) == facts(heap)
    assert [r.conversation for r in wall if r.turn == 1] == [
        r.conversation for r in heap if r.turn == 1
    ]
    twins = {(r.conversation, r.turn): r for r in heap if r.prefill_node is None}
    pairs = [(r, twins[r.conversation, r.turn]) for r in wall if (r.conversation, r.turn) in twins]
    assert len(pairs) >= 12
    assert min(w.ttft_s - h.ttft_s for w, h in pairs) > -0.0015  # FakeEngine's timers: whole ms
    assert median(w.ttft_s - h.ttft_s for w, h in pairs) < 0.015
    assert abs(median(w.tpot_s - h.tpot_s for w, h in pairs)) < 0.002


def test_memory_is_flat_over_two_thousand_conversations():
    """What a conversation held is gone when it ends: within 50 MB after a warm-up."""
    process = psutil.Process()
    talks = [
        Arrival(0.0, Conversation(f"c{i}", (Turn(600, 24), Turn(200, 24), Turn(200, 24))))
        for i in range(2_200)
    ]

    async def measure(spec, chosen):
        live = LiveSettings(TurnSettings("fake"), users=32)
        outcome = await play(spec, "roles", chosen, live)
        assert all(r.ok for r in outcome.records)
        return process.memory_info().rss

    with fake_process() as spec:
        warm = uvloop.run(measure(spec, talks[:200]))
        after = uvloop.run(measure(spec, talks[200:]))

    assert after - warm < 50e6


def test_several_processes_measure_what_one_does():
    """Same homes, routes, prompts and counts; one clock; every conversation once."""
    plan = (Turn(20, 6), Turn(25, 5, think_s=0.01))
    arrivals = [Arrival(0.005 * i, Conversation(f"c{i}", plan)) for i in range(40)]

    async def measure(processes):
        async with ScriptedCluster("2P_1D_1pD") as cluster:
            live = LiveSettings(TurnSettings("fake"), processes=processes)
            outcome = await play(cluster.spec, "roles", arrivals, live)
            replies = sorted(tuple(s.token_ids) for s in cluster.engines["d0"].served)
            return outcome, replies

    (one, one_replies), (many, many_replies) = (uvloop.run(measure(n)) for n in (1, 3))

    def facts(outcome):
        return sorted((r.conversation, r.turn, r.route, r.node, r.ok) for r in outcome.records)

    assert facts(one) == facts(many)
    assert one_replies == many_replies
    assert many.timing["load_processes"] == 3
    assert many.facts["path_proven"] is True
    assert all(r.scheduled_at_s <= r.sent_at_s for r in many.records)
    assert [r.sent_at_s for r in many.records] == sorted(r.sent_at_s for r in many.records)


def test_more_than_one_process_can_do_is_split():
    """Twenty thousand requests a second ask for several; a hundred or a closed loop for one."""
    fast = [Arrival(i / 20_000, Conversation(str(i), (Turn(1, 1),))) for i in range(2_000)]

    assert processes_for(fast[:1], None) == 1
    assert processes_for(fast, 32) == 1
    assert processes_for(fast, None) == min(5, len(os.sched_getaffinity(0)))


def test_a_load_process_that_cannot_reach_the_cluster_says_so():
    """The error is the worker's own sentence."""

    async def measure():
        async with ScriptedCluster("1R") as cluster:
            task = Task(
                cluster.spec, parse_policy("roles"), 1.0, TurnSettings("fake"), "s", 1,
                cluster.spec.topology.homes, singles(4, 0.0),
            )  # fmt: skip
        await run_split(split(task, 2))

    with pytest.raises(EngineError, match="is the server running"):
        uvloop.run(measure())
