"""A live point against FakeEngines: routes, histories, times, failures."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from functools import partial, wraps

import pytest
import uvloop

from ppdbench.cluster import control, nixl
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.counters import read_metrics
from ppdbench.cluster.link import SlowLink
from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.core.topology import Role
from ppdbench.http.client import Pool
from ppdbench.load.clock import WallClock
from ppdbench.load.hand_offs import HandOffGate
from ppdbench.load.history import IdHistory
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.share import Share, Task, connections_for
from ppdbench.load.turns import HttpTurns, TurnSettings
from ppdbench.policy.parse import parse_policy
from ppdbench.runs.aggregate import Plan, aggregate
from ppdbench.runs.points import PointKey
from ppdbench.runs.records import Outcome
from ppdbench.testing import FakeEngine, Fault, FaultKind, ScriptedCluster, Service, every


def on_uvloop(test):
    """Live points run on uvloop, so their tests do."""

    @wraps(test)
    def run(*args, **kwargs):
        return uvloop.run(test(*args, **kwargs))

    return run


async def until(condition):
    while not condition():  # noqa: ASYNC110  (any condition, not an event)
        await asyncio.sleep(0.001)


def settings(users=None, warm_up=(), **turns):
    return LiveSettings(TurnSettings("fake", **turns), users=users, warm_up=warm_up)


def talks(count, turns=3, new=40, out=8, gap_s=0.002, **more):
    plan = (Turn(new, out), *(Turn(new, out, think_s=0.001) for _ in range(turns - 1)))
    return [Arrival(i * gap_s, Conversation(f"c{i}", plan, **more)) for i in range(count)]


async def play(cluster, policy, arrivals, live=None, seed=1):
    spec = cluster if isinstance(cluster, ClusterSpec) else cluster.spec
    live = live or settings()
    return await run_live_point(spec, parse_policy(policy), arrivals, 10.0, live, seed)


@pytest.mark.parametrize(
    ("topology", "policy", "later"),
    [
        ("1P_1D", "remote", Route.REMOTE),
        ("1P_1D", "local", Route.LOCAL),
        ("1P_1pD", "roles", Route.LOCAL),
        ("2R", "roles", Route.REPLICA),
    ],
)
@on_uvloop
async def test_turns_take_the_route_the_policy_says(topology, policy, later):
    """Every turn succeeds, Turn 1 goes through P unless the home is an R, counts are whole."""
    async with ScriptedCluster(topology) as cluster:
        outcome = await play(cluster, policy, talks(4))

    records = outcome.records
    assert [r.error for r in records if not r.ok] == []
    assert Counter((r.turn > 1, r.route) for r in records) == Counter(
        {(False, Route.REPLICA if later is Route.REPLICA else Route.REMOTE): 4, (True, later): 8}
    )
    assert {(r.turn, r.context_tokens, r.prompt_tokens) for r in records} == {
        (1, 0, 40), (2, 48, 88), (3, 96, 136)
    }  # fmt: skip


@on_uvloop
async def test_instants_are_in_order_and_per_token():
    """Scheduled ≤ sent ≤ first token ≤ last token, and eight tokens have eight instants."""
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "remote", talks(4))

    for r in outcome.records:
        assert 0 <= r.scheduled_at_s <= r.sent_at_s <= r.first_token_at_s <= r.finished_at_s
        assert len(r.token_at_s) == 8
        assert (r.token_at_s[0], r.token_at_s[-1]) == (r.first_token_at_s, r.finished_at_s)


@on_uvloop
async def test_the_history_holds_the_models_own_reply():
    """A local turn finds the whole history but a partial block in the D's cache."""
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "local", talks(3))

    assert [(r.turn, r.cached_tokens) for r in outcome.records if r.conversation == "c1"] == [
        (1, 0), (2, 32), (3, 80)
    ]  # fmt: skip
    assert {r.effective_new_tokens for r in outcome.records if r.turn == 2} == {56}


@on_uvloop
async def test_a_remote_turn_has_the_prefill_nodes_cache_hits():
    """P never saw the reply, so it hits less than D; D's own figure would be the whole prompt."""
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "remote", talks(1))

    assert [r.cached_tokens for r in outcome.records] == [0, 32, 80]


@on_uvloop
async def test_caches_are_cold_at_every_point():
    """The same prompts on the same engines find nothing at the second point's Turn 1."""
    async with ScriptedCluster("1P_1D") as cluster:
        points = [await play(cluster, "local", talks(3)) for _ in range(2)]

    assert all(r.cached_tokens == 0 for p in points for r in p.records if r.turn == 1)


@on_uvloop
async def test_equal_seeds_send_equal_prompts_by_every_route():
    """Paired comparison: what the engines replied is a function of the prompt, and is equal."""
    replies = []
    for policy in ("remote", "local"):
        async with ScriptedCluster("1P_1D") as cluster:
            await play(cluster, policy, talks(3))
            replies.append(sorted(s.token_ids for s in cluster.engines["d0"].served))

    assert replies[0] == replies[1]


@on_uvloop
async def test_text_conversations_go_as_chat_with_the_real_reply():
    """The history a chat sends is what the model said; nothing of it was drawn."""
    plan = (Turn(2, 8, text="hello there"), Turn(1, 8, text="more"))
    talk = Conversation("c", plan, context_tokens=2, context_text="be brief")
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "local", [Arrival(0.0, talk)])

    assert [r.ok for r in outcome.records] == [True, True]
    assert [r.prompt_tokens for r in outcome.records] == [9, 22]


@on_uvloop
async def test_the_next_turn_waits_for_the_last_token_and_the_pause():
    """Think time counts from the end of the reply, and the schedule says so exactly."""
    async with ScriptedCluster("1R") as cluster:
        plan = (Turn(5, 3), Turn(5, 3, think_s=0.05))
        outcome = await play(cluster, "roles", [Arrival(0.01, Conversation("c", plan))])

    first, second = outcome.records
    assert first.scheduled_at_s == 0.01
    assert second.scheduled_at_s == first.finished_at_s + 0.05


@on_uvloop
async def test_a_closed_loop_holds_its_number_of_users():
    """Never more than three conversations at a time, and all are served."""
    async with ScriptedCluster("1R", lambda _: FakeEngine(service=Service(0.005))) as cluster:
        outcome = await play(cluster, "roles", talks(10, turns=2, gap_s=0), settings(users=3))

    begins = {r.conversation: r.scheduled_at_s for r in outcome.records if r.turn == 1}
    ends = {r.conversation: r.finished_at_s for r in outcome.records if r.turn == 2}
    assert len(ends) == 10
    for at in begins.values():
        assert sum(begins[c] <= at < ends[c] for c in ends) <= 3


@on_uvloop
async def test_warm_up_is_marked_and_apart():
    """Its records never count, and the point's clock starts after it."""
    warm = [Arrival(0.0, Conversation("w", (Turn(4, 2),)))]
    async with ScriptedCluster("1R") as cluster:
        outcome = await play(cluster, "roles", talks(2, turns=1), settings(warm_up=warm))

    assert [(r.conversation, r.warm_up) for r in outcome.records] == [
        ("w", True), ("c0", False), ("c1", False)
    ]  # fmt: skip
    assert outcome.records[1].scheduled_at_s == 0.0


@pytest.mark.parametrize(
    ("fault", "outcome", "words"),
    [
        (Fault(FaultKind.STATUS, status=503), Outcome.UPSTREAM_STATUS, "503: scripted failure"),
        (Fault(FaultKind.CLOSE), Outcome.NO_FIRST_BYTE, "without an answer"),
        (Fault(FaultKind.HANG), Outcome.NO_FIRST_BYTE, "no answer after"),
        (Fault(FaultKind.BREAK, after_tokens=3), Outcome.BROKEN_STREAM, "in the middle"),
        (Fault(FaultKind.END_SILENTLY, after_tokens=3), Outcome.BROKEN_STREAM, "without [DONE]"),
        (Fault(FaultKind.ERROR_EVENT, after_tokens=3), Outcome.BROKEN_STREAM, "scripted failure"),
        (Fault(FaultKind.STOP_SHORT, after_tokens=3), Outcome.WRONG_LENGTH, "3 tokens instead"),
        (Fault(FaultKind.STOP_SHORT, after_tokens=0), Outcome.WRONG_LENGTH, "0 tokens instead"),
    ],
    ids=str,
)
@on_uvloop
async def test_each_failure_has_its_cause_and_ends_its_conversation_alone(fault, outcome, words):
    """The failing conversation stops; the others never notice."""
    faults = every(1000, fault)
    async with ScriptedCluster("1R", lambda _: FakeEngine(faults=faults)) as cluster:
        live = settings(first_byte_timeout_s=1.0 if fault.kind is FaultKind.HANG else 60.0)
        result = await play(cluster, "roles", talks(3, turns=2, gap_s=0.1), live)

    failed = [r for r in result.records if not r.ok]
    assert [r.outcome for r in failed] == [outcome]
    assert words in failed[0].error
    assert failed[0].ttft_s is None
    assert len(result.records) == 5


@on_uvloop
async def test_a_turn_over_its_time_is_cancelled_at_the_engine():
    """A stream that never ends costs no more than the limit, and the engine is told."""
    slow = Service(0.0, 10.0)
    async with ScriptedCluster("1R", lambda _: FakeEngine(service=slow)) as cluster:
        live = settings(turn_timeout_s=0.3)
        result = await play(cluster, "roles", talks(1, turns=1), live)
        await until(lambda: cluster.engines["r0"].cancelled == 1)

    assert result.records[0].outcome is Outcome.TIMEOUT


@on_uvloop
async def test_a_hand_off_has_the_first_byte_limit_on_each_of_its_two_requests():
    """P answered within the limit, and so did D: together they may take longer."""
    limit = settings(first_byte_timeout_s=0.6)

    async with ScriptedCluster("1P_1D", lambda _: FakeEngine(service=Service(0.4, 0.0))) as cluster:
        outcome = await play(cluster, "remote", talks(1, turns=1), limit)

    assert [record.outcome for record in outcome.records] == [Outcome.OK]
    assert outcome.records[0].ttft_s > 0.75


@on_uvloop
async def test_nobody_listening_is_an_error_before_the_point():
    """A cluster that is not there at the start is one sentence, not a point of failed turns."""
    async with FakeEngine() as engine:
        spec = ClusterSpec((Node("r0", Role.R, engine.url),))
        live = settings(warm_up=())
    with pytest.raises(Exception, match="is the server running"):
        await play(spec, "roles", talks(2), live)


@on_uvloop
async def test_a_node_that_dies_during_the_point_refuses_what_comes_later():
    """Turns after the death are recorded as refused or broken, with the node's address."""
    async with ScriptedCluster("1R") as cluster:
        engine = cluster.engines["r0"]
        point = asyncio.create_task(play(cluster, "roles", talks(40, turns=1, gap_s=0.01)))
        await until(lambda: len(engine.served) >= 5)
        await engine.close()
        result = await point

    outcomes = Counter(r.outcome for r in result.records)
    assert len(result.records) == 40
    assert outcomes[Outcome.OK] >= 5
    assert outcomes[Outcome.REFUSED] > 0


@on_uvloop
async def test_a_point_that_is_stopped_cancels_what_is_out():
    """A cancelled point, as a timeout around it does, leaves nothing running at the engines."""
    async with ScriptedCluster("1R", lambda _: FakeEngine(service=Service(60.0))) as cluster:
        engine = cluster.engines["r0"]
        point = asyncio.create_task(play(cluster, "roles", talks(5, turns=1)))
        await until(lambda: engine.running == 5)
        point.cancel()
        with pytest.raises(asyncio.CancelledError):
            await point
        await until(lambda: engine.cancelled == 5)


@on_uvloop
async def test_pull_without_an_offer_is_a_remote_turn_that_says_so():
    """A stream offers no KV, so nothing is pulled and the record does not claim it."""
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "pull", talks(1))

    assert [r.reason for r in outcome.records[1:]] == ["pull refused: no_kv_offered"] * 2
    assert {r.route for r in outcome.records} == {Route.REMOTE}


@on_uvloop
async def test_pulls_come_after_unstreamed_turns_which_have_no_ttft_of_their_own():
    """A turn that another follows is asked for whole, so D offers its KV; the last one streams."""
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "pull", talks(4), settings(for_pulls=True))
        on_p = read_metrics(cluster.engines["p0"].metrics()).counters

    by_turn = {turn: [r for r in outcome.records if r.turn == turn] for turn in (1, 2, 3)}
    assert all(record.ok for record in outcome.records)
    assert {r.route for r in by_turn[1]} == {Route.REMOTE}
    assert {r.route for r in by_turn[2] + by_turn[3]} == {Route.PULL}
    assert {(r.whole, r.ttft_s, r.tpot_s) for r in by_turn[1] + by_turn[2]} == {(True, None, None)}
    assert all(r.ttft_s > 0 and r.output_tokens == 8 for r in by_turn[3])
    assert [len(r.token_at_s) for turn in (1, 2, 3) for r in by_turn[turn]] == [0] * 8 + [8] * 4
    assert on_p.transfers == 8


@on_uvloop
async def test_what_p_holds_for_a_d_that_is_gone_is_freed_by_another_d():
    """The refused D's turns fail; P keeps no blocks for them until its lease."""
    async with ScriptedCluster("1P_2D") as cluster:
        spec = cluster.spec
        await cluster.engines["d1"].close()
        turns = HttpTurns(spec, WallClock(), TurnSettings("fake"), salt="s", seed=1)
        prefilled = await prefill(cluster)
        assert cluster.engines["p0"].held

        turns.release(prefilled, refused_by="d1")

        while cluster.engines["p0"].held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await turns.close()
        turns.clock.close()


@on_uvloop
async def test_a_slow_link_delays_hand_offs_and_nothing_else():
    """A remote turn comes later by at least the emulated delay; a local one does not wait."""
    link = SlowLink(bytes_per_s=1000, kv_bytes_per_token=1, real_s_per_byte=0, block_tokens=16)
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "local", talks(3, turns=2, new=160), settings(slow_link=link))

    assert all(record.ok for record in outcome.records)
    ttfts = {
        route: [r.ttft_s for r in outcome.records if r.route is route]
        for route in (Route.REMOTE, Route.LOCAL)
    }
    assert min(ttfts[Route.REMOTE]) >= 0.16
    assert min(ttfts[Route.LOCAL]) < 0.16  # the quickest: a busy machine may delay any other


@on_uvloop
async def test_a_turn_given_up_on_the_slow_link_leaves_nothing_at_p():
    """D was never asked, so P is told to free what it holds."""
    link = SlowLink(bytes_per_s=1.0, kv_bytes_per_token=1, real_s_per_byte=0, block_tokens=16)
    live = settings(slow_link=link, turn_timeout_s=0.2)
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "remote", talks(3, turns=1), live)
        while cluster.engines["p0"].held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    assert {record.outcome for record in outcome.records} == {Outcome.TIMEOUT}


def most_at_once(spans):
    ends = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(itertools.accumulate(step for _, step in ends))


@on_uvloop
async def test_no_more_hand_offs_than_allowed_are_out_at_a_p():
    """Six turns at once and room for two: the others wait, and their TTFT says so."""
    turns = talks(6, turns=1, gap_s=0)
    async with ScriptedCluster("1P_1D", lambda _: FakeEngine(service=Service(0.05))) as cluster:
        outcome = await play(cluster, "remote", turns, settings(max_hand_offs=2))
        free = await play(cluster, "remote", turns, settings())

    bounded, unbounded = outcome.records, free.records
    assert all(record.ok for record in [*bounded, *unbounded])
    assert most_at_once([(r.sent_at_s, r.first_token_at_s) for r in bounded]) == 2
    assert most_at_once([(r.sent_at_s, r.first_token_at_s) for r in unbounded]) == 6
    assert max(r.ttft_s for r in bounded) >= 0.3


@on_uvloop
async def test_a_limit_on_hand_offs_holds_for_a_load_that_would_be_split():
    """Two processes would count to the limit each; one says honestly when it is late."""
    turns = talks(6, turns=1, gap_s=1e-5)
    async with ScriptedCluster("1P_1D", lambda _: FakeEngine(service=Service(0.05))) as cluster:
        outcome = await play(cluster, "remote", turns, settings(max_hand_offs=2))

    assert outcome.timing["load_processes"] == 1
    assert most_at_once([(r.sent_at_s, r.first_token_at_s) for r in outcome.records]) == 2


def test_a_hand_off_that_was_given_up_while_it_waited_takes_no_room():
    """The next in line goes instead."""
    gate, begun = HandOffGate(1), []

    def begin(name, wanted):
        return lambda: begun.append(name) or wanted

    gate.enter("p0", begin("a", wanted=True))
    gate.enter("p0", begin("given up", wanted=False))
    gate.enter("p0", begin("b", wanted=True))
    gate.enter("p1", begin("elsewhere", wanted=True))
    assert begun == ["a", "elsewhere"]
    gate.leave("p0")
    assert begun == ["a", "elsewhere", "given up", "b"]
    gate.leave("p0")
    gate.enter("p0", begin("c", wanted=True))
    assert begun[-1] == "c"
    assert gate.waited == 2


async def prefill(cluster):
    """A hand-off that P has prepared and nobody has fetched."""
    node = cluster.spec["p0"]
    body = nixl.prefill_body({"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4})
    answer = await asyncio.to_thread(control.post, node, "/v1/completions", body, 10.0)
    return nixl.read_prefilled(answer)


@on_uvloop
async def test_lags_are_measured():
    """Send lag and loop lag are there and are not negative."""
    async with ScriptedCluster("1R") as cluster:
        facts = (await play(cluster, "roles", talks(20, turns=1))).facts

    assert facts["send_lag_p99_s"] >= 0
    assert facts["loop_lag_p99_s"] >= 0
    assert facts["window_s"] == pytest.approx(19 * 0.002)


def validity(outcome, arrivals):
    key = PointKey("1P_1D", "remote", "w", 1.0)
    return aggregate(key, 1, outcome, Plan.of(arrivals))["validity"]


@on_uvloop
async def test_an_honest_cluster_proves_its_path_and_says_what_moved():
    """D's own counters agree with the turns that went through P."""
    arrivals = talks(12)
    async with ScriptedCluster("1P_1D") as cluster:
        outcome = await play(cluster, "remote", arrivals)

    assert outcome.facts["path_proven"] is True
    assert outcome.facts["bytes_moved"] > 0
    assert "path_unproven" not in validity(outcome, arrivals)


@on_uvloop
async def test_a_d_that_ignores_the_hand_off_makes_the_point_unproven():
    """Every answer is right and fast; only the counters show that P worked for nothing."""

    def engine_for(node):
        return FakeEngine(honest_handoff=node.role is Role.P)

    arrivals = talks(12)
    async with ScriptedCluster("1P_1D", engine_for) as cluster:
        outcome = await play(cluster, "remote", arrivals)

    assert all(r.ok for r in outcome.records)
    assert "path_unproven" in validity(outcome, arrivals)


@on_uvloop
async def test_a_client_slowed_on_purpose_marks_itself_limited():
    """Thirty milliseconds of blocked loop now and then, as a garbage collection may do."""

    async def slow_down():
        while True:
            time.sleep(0.03)  # noqa: ASYNC251  (the very fault that is tested)
            await asyncio.sleep(0.005)

    arrivals = talks(30, turns=1)
    async with ScriptedCluster("1P_1D") as cluster:
        slow = asyncio.create_task(slow_down())
        outcome = await play(cluster, "remote", arrivals)
        slow.cancel()

    assert "client_limited" in validity(outcome, arrivals)


@on_uvloop
async def test_a_cache_that_knew_the_prompts_contaminates_the_point():
    """An engine that ignores the salt finds Turn 1's tokens, and the point may not vote."""
    body = {"cache_salt": ""}
    arrivals = talks(8, turns=1)
    async with ScriptedCluster("1R") as cluster:
        points = [await play(cluster, "roles", arrivals, settings(extra=body)) for _ in range(2)]

    assert ["cache_contaminated" in validity(p, arrivals) for p in points] == [False, True]


@on_uvloop
async def test_ten_failing_conversations_of_a_hundred():
    """90/10, and percentiles that count a failure as never finishing differ from the plain."""
    faults = every(10, Fault(FaultKind.STATUS))
    arrivals = talks(100, turns=1, gap_s=0.001)
    async with ScriptedCluster("1R", lambda _: FakeEngine(faults=faults)) as cluster:
        outcome = await play(cluster, "roles", arrivals)
    point = aggregate(PointKey("1R", "roles", "w", 1.0), 1, outcome, Plan.of(arrivals))

    assert point["success"] == 0.9
    assert Counter(r.outcome for r in outcome.records) == {
        Outcome.OK: 90, Outcome.UPSTREAM_STATUS: 10
    }  # fmt: skip
    assert point["all"]["adjusted"]["ttft_s"]["p95"] is None
    assert point["all"]["ttft_s"]["p95"] > 0


class BrokenPolicy:
    """A policy with a bug in it."""

    name = "broken"

    def decide(self, features, home):
        raise ZeroDivisionError(features.key)


@on_uvloop
async def test_a_bug_in_a_policy_ends_the_point_at_once():
    """It must not leave a conversation that nobody waits for, and a run that never ends."""
    async with ScriptedCluster("1P_1D") as cluster:
        with pytest.raises(ZeroDivisionError, match="c0/2"):
            await run_live_point(cluster.spec, BrokenPolicy(), talks(1), 1.0, settings(), 1)


@on_uvloop
async def test_a_bug_at_the_end_of_an_answer_ends_the_point_at_once(monkeypatch):
    """The event loop would only log it, and the turn would be out until its time is over."""
    monkeypatch.setattr(IdHistory, "hear", lambda *_: 1 / 0)

    async with asyncio.timeout(5), ScriptedCluster("1P_1D") as cluster:
        with pytest.raises(ZeroDivisionError):
            await play(cluster, "local", talks(1))


@on_uvloop
async def test_the_first_turns_after_a_long_warm_up_open_no_connections(monkeypatch):
    """Those opened before it are too old by then to be used."""
    at_start = []
    monkeypatch.setattr("ppdbench.load.turns.Pool", partial(Pool, idle_limit_s=0.2))
    run = Share.run

    async def counted(share, *rest):
        pool = share._turns._pools[None]
        now_s = time.monotonic()
        fresh = [c for idle in pool._idle.values() for c in idle if now_s - c.idle_since_s < 0.2]
        at_start.append(len(fresh))
        return await run(share, *rest)

    monkeypatch.setattr(Share, "run", counted)
    live = settings(warm_up=talks(1, turns=1))
    async with ScriptedCluster("1R", lambda _: FakeEngine(service=Service(0.4))) as cluster:
        await play(cluster, "roles", talks(1, turns=1), live)

    assert at_start[0] >= 8


def test_connections_for_a_hiccup_are_open_before_the_point_begins():
    assert connections_for(_task(turns_per_s=10)) == 8
    assert connections_for(_task(turns_per_s=2_000)) == pytest.approx(100, abs=1)
    assert connections_for(_task(turns_per_s=10**6)) == 1_024
    assert connections_for(_task(turns_per_s=10, users=32)) == 32


def test_no_more_connections_are_opened_than_conversations_can_use():
    """A conversation has one turn out at a time; arrivals at one instant come all at once."""
    assert connections_for(_task(turns_per_s=10, users=5_000, count=20)) == 20
    assert connections_for(_task(turns_per_s=10**6, count=20)) == 20
    assert connections_for(_task(turns_per_s=float("inf"), count=200)) == 200
    assert connections_for(_task(turns_per_s=1, count=1)) == 8


def _task(turns_per_s, users=None, count=10_000):
    two = (Turn(8, 2), Turn(8, 2))
    arrivals = [Arrival(2 * i / turns_per_s, Conversation(str(i), two)) for i in range(count)]
    spec = ClusterSpec((Node("r0", Role.R, "http://127.0.0.1:9"),))
    settings = TurnSettings("m")
    policy = parse_policy("roles")
    return Task(spec, policy, 1.0, settings, "", 0, spec.topology.homes, arrivals, users)
