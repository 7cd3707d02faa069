"""Running it: reload, shadow, drift, a table for another engine, restarts, overrides."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest

from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Role
from ppdbench.http.server import Responder
from ppdbench.policy.rules import decide
from ppdbench.policy.table import load_table_policy
from ppdbench.router.answer import Counted
from ppdbench.router.drift import HOLD_S, MIN_TURNS, Drift
from ppdbench.router.estimate import OUTPUT_TOKENS
from ppdbench.router.fitness import LiveFacts, mismatches
from ppdbench.router.history import Answer
from ppdbench.router.policies import check_policy, load_policy
from ppdbench.table.schema import AXES, Cell, Table, save_table
from ppdbench.table.score import STATISTICS, Rule, Side
from ppdbench.testing.fake import Service

from .tables import a_table

USER = [{"role": "user", "content": "hello there, how are you today?"}]


def follow_up(first):
    answer = {"role": "assistant", "content": first.text()}
    return [*USER, answer, {"role": "user", "content": "go on"}]


async def test_the_table_decides_and_the_receipt_names_its_cell(bench_for, tmp_path):
    """Cell and score stand in the headers and in /ppd/decisions, with the outcome."""
    a_table(tmp_path / "t.json", local=True)
    bench = await bench_for("1P_1D", policy=f"table:{tmp_path / 't.json'}")

    second = await bench.chat(follow_up(await bench.chat(USER)), stream=True)
    receipts = (await bench.get("/ppd/decisions")).json()["decisions"]

    assert second.route == "local"
    assert receipts[0]["cell"] == int(second.header("x-ppd-cell"))
    assert receipts[0]["score"] == pytest.approx(float(second.header("x-ppd-score")), abs=1e-4)
    assert receipts[0]["outcome"] == "ok"
    assert receipts[0]["ttft_s"] > 0
    assert receipts[0]["cached_tokens"] is not None


async def test_the_same_features_give_the_same_decision_everywhere(bench_for, tmp_path):
    """What HTTP decided is what the policy says of the receipt's features."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}")
    first = await bench.chat(USER)
    await bench.chat(follow_up(first))

    receipt = (await bench.get("/ppd/decisions")).json()["decisions"][0]
    names = ("turn", "context_tokens", "new_tokens", "output_tokens", "rate_per_s", "running")
    features = Features(**{name: receipt[name] for name in names})
    decision = decide(load_table_policy(str(path)), features, Role.D)

    assert (decision.route.value, decision.cell) == (receipt["route"], receipt["cell"])


async def test_a_changed_table_is_taken_and_a_bad_one_is_not(bench_for, tmp_path):
    """Reload is whole or not at all; the file in use stays when the new one is broken."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}")
    first = await bench.chat(USER)
    routes = [(await bench.chat(follow_up(first))).route]

    path.write_text("{")
    await bench.router.reload()
    routes.append((await bench.chat(follow_up(first))).route)
    a_table(path, local=False)
    await bench.router.reload()
    routes.append((await bench.chat(follow_up(first))).route)

    assert routes == ["local", "local", "remote"]
    assert (bench.total("reloads"), bench.total("reloads_failed")) == (1, 1)


async def test_a_table_of_the_same_time_and_size_is_another_all_the_same(bench_for, tmp_path):
    """As installed files are; they differ in nothing that anyone can set."""
    path, other = tmp_path / "t.json", tmp_path / "other.json"
    a_table(path, local=True, note="")
    a_table(other, local=False, note="")
    a_table(path, local=True, note=" " * (other.stat().st_size - path.stat().st_size))
    assert other.stat().st_size == path.stat().st_size
    bench = await bench_for("1P_1D", policy=f"table:{path}")
    first = await bench.chat(USER)
    before = path.stat().st_mtime_ns

    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(before, before))
    await bench.router.reload()

    assert (await bench.chat(follow_up(first))).route == "remote"


async def test_of_two_reloads_at_once_the_newest_file_wins(bench_for, tmp_path):
    """However slowly a node answers the first one's question."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}")
    first = await bench.chat(USER)
    routes = bench.engines["d0"]._shell._routes
    models, loop, asked = routes["/v1/models"], asyncio.get_running_loop(), []

    def answer_the_first_late(incoming, responder):
        asked.append(incoming)
        loop.call_later(0.3 if len(asked) == 1 else 0.0, models, incoming, responder)

    routes["/v1/models"] = answer_the_first_late
    older = asyncio.create_task(bench.router.reload())
    await until(lambda: asked)
    a_table(path, local=False)
    await asyncio.gather(older, bench.router.reload())

    assert bench.total("reloads") == 2
    assert (await bench.chat(follow_up(first))).route == "remote"


async def test_a_table_taken_on_demand_is_not_taken_again_by_the_watch(bench_for, tmp_path):
    """One change is one reload, and one sentence in the log where it is bad."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}")

    for content in ("good", "bad"):
        if content == "good":
            a_table(path, local=False)
        else:
            path.write_text("{")
        await bench.router.reload()

        assert not bench.router._tables.changed()


@pytest.mark.slow
async def test_a_changed_file_is_noticed_without_a_signal(bench_for, tmp_path):
    """The router looks at its table's file about once a second."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}")

    a_table(path, local=False)

    await until(lambda: bench.total("reloads") == 1)
    first = await bench.chat(USER)
    assert (await bench.chat(follow_up(first))).route == "remote"


async def test_shadow_mode_routes_by_the_fixed_policy_and_logs_the_table(bench_for, tmp_path):
    """The table is asked, written down and not obeyed."""
    a_table(tmp_path / "t.json", local=True)
    bench = await bench_for("1P_1D", policy="remote", shadow=f"table:{tmp_path / 't.json'}")

    second = await bench.chat(follow_up(await bench.chat(USER)))
    receipt = (await bench.get("/ppd/decisions")).json()["decisions"][0]

    assert (second.route, receipt["shadow_route"]) == ("remote", "local")
    assert bench.total("shadow_differs") == 1


async def test_a_table_of_another_model_refuses_and_names_the_field(bench_for, tmp_path):
    """Unless the operator allows it, loudly."""
    path = tmp_path / "t.json"
    a_table(path, local=True, model="another-model")
    bench = await bench_for("1P_1D")
    config = replace(bench.router.config, policy=f"table:{path}")
    policy = load_policy(config)

    with pytest.raises(UsageError, match="model: the table's is 'another-model'"):
        await check_policy(policy, config)
    warnings = await check_policy(policy, replace(config, allow_mismatch=True))

    assert "MISMATCH" in warnings[0]


async def test_a_table_from_the_simulator_fits_nodes_that_only_speak_the_api(bench_for, tmp_path):
    """Simulated nodes run no engine, so their version contradicts no table: the demo's case."""
    path = tmp_path / "t.json"
    a_table(path, local=True, engine_version="measured: operator times 0.12.0")
    bench = await bench_for("1P_1D")
    config = replace(bench.router.config, policy=f"table:{path}")

    assert not await check_policy(load_policy(config), config)


def test_every_field_that_a_node_tells_is_compared():
    """Unknown on either side is no mismatch."""
    facts = LiveFacts("d0", frozenset({"m"}), "0.32.0", 128)

    wrong = {"model": "x", "engine_version": "0.31.0", "block_size": 16}
    assert [text.partition(":")[0] for text in mismatches(wrong, facts)] == list(wrong)
    assert not mismatches({"model": "m", "engine_version": None, "block_size": 128}, facts)
    assert not mismatches(wrong, LiveFacts("d0"))


def test_drift_turns_the_table_off_for_a_while(tmp_path):
    """A mean factor above two for long enough gives the default, with the reason."""
    drift = Drift(a_table(tmp_path / "t.json", local=True))
    decision = Decision(Route.LOCAL, "table", 0, 0.5)

    for _ in range(MIN_TURNS - 1):
        drift.feed(decision, 0.2, now_s=10)
    before = drift.corrected(decision, 10)
    drift.feed(decision, 0.2, now_s=10)

    assert before is decision
    assert drift.corrected(decision, 11) == Decision(Route.REMOTE, "drift")
    assert drift.corrected(decision, 1000) is decision


@pytest.mark.parametrize(
    ("expected", "stat", "reason", "ttft_s"),
    [
        ({"p50": 0.05, "p99": 0.5}, "p99", "table", 0.05),
        ({"mean": 0.05}, "mean", "table,extrapolated", 0.5),
    ],
    ids=["a table of tails", "outside the measured range"],
)
def test_turns_as_the_cells_say_or_beyond_them_are_no_drift(expected, stat, reason, ttft_s):
    """A tail is no expectation of a turn, and a far turn is not the cell's."""
    tpot_s = dict.fromkeys(STATISTICS, 0.01)
    side = Side(50, 1.0, dict.fromkeys(STATISTICS) | expected, tpot_s, tpot_s)
    centre = dict(zip(AXES, (64, 16, 16, 1.0), strict=True))
    cell = Cell(
        topology="1P_1D", workload="w", backend="sim", centre=centre, remote=side, local=side
    )
    drift = Drift(Table(Rule(stat=stat), {}, (cell,)))

    for _ in range(2 * MIN_TURNS):
        drift.feed(Decision(Route.LOCAL, reason, 0, 0.5), ttft_s, now_s=10)

    assert not drift.alarm(10)


async def test_a_turn_that_outlives_its_table_ends_as_any_other(bench_for, tmp_path):
    """Its cell is of the old table; the new one may have fewer."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    slow = lambda _: {"service": Service(0.2, 0.001)}  # noqa: E731
    bench = await bench_for("1P_1D", policy=f"table:{path}", engine=slow)
    talk = [{"role": "user", "content": "t1 " * 200}]
    talk += [assistant(await bench.chat(talk)), {"role": "user", "content": "t2 " * 100}]
    wanted = {"stream": True, "max_tokens": 200, "ignore_eos": True}
    turn = asyncio.create_task(bench.chat(talk, **wanted))
    await until(lambda: bench.total("in_flight") == 1 and bench.engines["d0"].running)
    table = load_table_policy(str(path)).table
    save_table(replace(table, cells=table.cells[:1]), path)
    await bench.router.reload()

    assert (await turn).reason == "table"
    await until(lambda: bench.total("in_flight") == 0)
    receipt = (await bench.get("/ppd/decisions?limit=1")).json()["decisions"][0]
    assert (receipt["turn"], receipt["outcome"], receipt["cell"] > 0) == (2, "ok", True)


async def test_the_alarm_is_seen_to_end_though_no_turn_comes(bench_for, tmp_path):
    """The gauge follows the clock, not the traffic."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}")
    now_s = time.monotonic() + bench.router.services.clock_offset_s
    for _ in range(MIN_TURNS):
        bench.router.services.chooser.drift.feed(
            Decision(Route.LOCAL, "table", 0, 0.5), 50.0, now_s
        )
    await until(lambda: bench.total("drift_alarm") == 1)
    bench.router.services.clock_offset_s += HOLD_S

    await until(lambda: bench.total("drift_alarm") == 0)


async def test_a_client_may_choose_only_where_that_is_allowed(bench_for):
    """x-ppd-force-route is ignored by default and refused when it names no route."""
    closed = await bench_for("1P_1D", policy="remote")
    open_ = await bench_for("1P_1D", policy="remote", allow_override=True)
    wish = {"x_ppd_force_route": "local"}

    ignored = await closed.chat(follow_up(await closed.chat(USER)), headers=wish)
    obeyed = await open_.chat(follow_up(await open_.chat(USER)), headers=wish)
    refused = await open_.chat(USER, headers={"x_ppd_force_route": "sideways"})

    assert (ignored.route, obeyed.route, obeyed.reason) == ("remote", "local", "override")
    assert refused.status == 400


async def test_without_its_memory_the_router_says_cold(bench_for):
    """A history that nobody remembers may be anywhere: remote, and honestly so."""
    bench = await bench_for("1P_1D", policy="local")
    history = [*USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]

    reply = await bench.chat(history)

    assert (reply.route, reply.reason) == ("remote", "cold")


async def test_a_state_file_outlives_a_restart(bench_for, tmp_path):
    """With --state-file the next turn goes home also after the router was started anew."""
    from ppdbench.router.shared import Shared, make_buffer
    from ppdbench.router.worker import Router

    bench = await bench_for("1P_2D", policy="local", state_file=tmp_path / "state")
    first = await bench.chat(USER)
    await bench.router.close()
    config = bench.router.config
    again = Router(config, load_policy(config), Shared.over(make_buffer(config), config, 0))
    async with again:
        bench.router = again
        second = await bench.chat(follow_up(first))

    assert (second.route, second.node) == ("local", first.node)


async def test_a_receipt_says_when_by_the_wall_clock(bench_for):
    """A line of a log without a time explains little; and a state file outlives reboots."""
    bench = await bench_for("1R", policy="roles")
    begun_s = time.time()
    await bench.chat(USER)
    decisions = (await bench.get("/ppd/decisions")).json()["decisions"]

    assert begun_s - 1 < decisions[0]["at_s"] < time.time() + 1


async def test_a_home_that_evicts_is_not_trusted_for_as_old_turns(bench_for):
    """An answer with nothing cached shows what D has lost; turns that ended earlier are cold."""
    bench = await bench_for("1P_1D", policy="local")
    openings = [[{"role": "user", "content": f"{name} " * 400}] for name in ("one", "two")]
    talks = []
    for opening in openings:
        answer = {"role": "assistant", "content": (await bench.chat(opening)).text()}
        talks.append([*opening, answer, {"role": "user", "content": "go on"}])
    assert bench.engines["d0"].reset_prefix_cache()

    lost, cold = [await bench.chat(messages) for messages in reversed(talks)]

    assert (lost.route, cold.route, cold.reason) == ("local", "remote", "cold")


async def test_what_was_computed_after_a_loss_is_trusted_however_late_the_loss_is_seen(bench_for):
    """After a fast restart a turn in the air finds nothing: that says nothing of younger KV."""
    bench = await bench_for("1P_1D", policy="local")
    old = await talk_of(bench, "old")
    assert bench.engines["d0"].reset_prefix_cache()
    bench.router.services.clock_offset_s += 10
    young = await talk_of(bench, "young")
    lost = await bench.chat(old)
    bench.router.services.clock_offset_s += 20

    again = await bench.chat(young)

    assert lost.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (again.route, again.reason) == ("local", "policy")
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 256


async def test_a_loss_of_a_note_from_before_the_clock_was_set_back_is_one_of_now(bench_for):
    """As after a restart with a state file: it must not speak of what is computed for an hour."""
    bench = await bench_for("1P_1D", policy="local")
    ahead = await talk_of(bench, "ahead")
    assert bench.engines["d0"].reset_prefix_cache()
    bench.router.services.clock_offset_s -= 3600
    lost = await bench.chat(ahead)
    bench.router.services.clock_offset_s += 2
    young = await talk_of(bench, "young")

    later = await bench.chat(young)

    assert lost.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (later.route, later.reason) == ("local", "policy")


async def talk_of(bench, name):
    """A conversation that is long enough to be judged, with its second question."""
    opening = {"role": "user", "content": f"{name} " * 400}
    answer = assistant(await bench.chat([opening]))
    return [opening, answer, {"role": "user", "content": "go on"}]


async def test_a_named_conversation_with_another_opening_is_cold_and_blames_no_cache(bench_for):
    """A clock in the system message: nothing is held, and the home has lost nothing."""
    bench = await bench_for("1P_1D", policy="local")
    other = await talk_of(bench, "other")
    bench.router.services.clock_offset_s += 10
    named = {"headers": {"x_session_id": "s"}}
    talk = [{"role": "system", "content": "It is 12:00:01"},
            {"role": "user", "content": " ".join(f"t{at}" for at in range(400))}]  # fmt: skip
    talk.append(assistant(await bench.chat(talk, **named)))
    talk[0] = {"role": "system", "content": "It is 12:00:02"}

    second = await bench.chat([*talk, {"role": "user", "content": "on"}], **named)
    unharmed = await bench.chat(other)

    assert (second.route, second.reason) == ("remote", "cold")
    assert (unharmed.route, unharmed.reason) == ("local", "policy")


@pytest.mark.parametrize("reminders", [[], [{"role": "system", "content": "be brief"}]])
@pytest.mark.parametrize("name", [None, b"session"])
async def test_reasoning_that_a_template_takes_out_is_no_eviction(bench_for, name, reminders):
    """Before tool calls it stays in the prompt until the next question, and is gone from all then.

    In between a loss is a loss, and it is one again behind that question.
    """
    chooser = (await bench_for("1P_1D", policy="local")).router.services.chooser
    history, seen = [{"role": "user", "content": "a question"}], []
    step = Answer("", "call_0", tokens=50, reasoned=True)
    for answer, message in (
        (step, {"role": "tool", "tool_call_id": "call_0", "content": "a result"}),
        (step, {"role": "tool", "tool_call_id": "call_0", "content": "a result"}),
        (Answer("done", tokens=5), {"role": "user", "content": "another question"}),
        (Answer("done", tokens=5), {"role": "user", "content": "and another"}),
        (Answer("done", tokens=5), {"role": "user", "content": "and a last one"}),
    ):
        body, now_s = {"messages": history}, 1000.0 * len(history)
        counted = Counted(900, answer.tokens, cached_tokens=16)
        plan = chooser.plan(body, name, now_s)
        seen.append(chooser.learn(plan, body, counted, now_s))
        chooser.note(plan, answer, 900, now_s + 1)
        shown = {"role": "assistant", "content": answer.text}
        if answer.tools:
            shown["tool_calls"] = [{"id": answer.tools}]
        history = [*history, shown, message, *reminders]

    assert seen == [False, True, True, False, True]


@pytest.mark.parametrize("shown", [True, False])
async def test_behind_steps_whose_reasoning_goes_only_their_question_is_held(bench_for, shown):
    """All steps behind it move up then. A client that sent no reasoning has them held as they are.

    The loss of that question is one, as anywhere.
    """
    chooser = (await bench_for("1P_1D", policy="local")).router.services.chooser
    history = [{"role": "user", "content": "a question"}]
    for at, answer in enumerate((*[Answer("", "call", 50, reasoned=True)] * 3, Answer("done"))):
        body, prompt_tokens = {"messages": history}, 900 + 100 * at
        plan = chooser.plan(body, None, 1000.0 + at)
        chooser.note(plan, answer, prompt_tokens, 1000.0 + at)
        told = {"role": "assistant", "content": answer.text}
        if answer.tools:
            told |= {"tool_calls": [{"id": "call"}]} | ({"reasoning": "why"} if shown else {})
        history = [*history, told, {"role": "tool", "content": "a result " * 100}]
    history[-1] = {"role": "user", "content": "another question"}

    plan = chooser.plan({"messages": history}, None, 1010.0)

    assert (plan.decision.route, plan.features.turn) == (Route.LOCAL, 5)
    assert plan.features.context_tokens == (900 if shown else 1200)
    assert (plan.features.new_tokens > 600) is shown
    assert chooser.learn(plan, {"messages": history}, Counted(1250, 5, 16), 1010.0) is shown


async def test_an_answer_that_comes_back_as_other_tokens_is_no_eviction(bench_for):
    """What D answered is not what it reads now, but it holds the question: nothing was lost."""
    bench = await bench_for("1P_1D", policy="local")
    talks = {}
    for name in ("one", "two"):
        opening = {"role": "user", "content": f"{name} " * 400}
        await bench.chat([opening], max_tokens=600, headers={"x_session_id": name})
        shown = {"role": "assistant", "content": "what is left of a long answer"}
        talks[name] = [opening, shown, {"role": "user", "content": "go on"}]

    replies = [
        await bench.chat(messages, headers={"x_session_id": name})
        for name, messages in talks.items()
    ]

    counts = [reply.json()["usage"] for reply in replies]
    assert all(c["prompt_tokens_details"]["cached_tokens"] >= 384 for c in counts)
    assert [reply.route for reply in replies] == ["local", "local"]


async def test_a_pull_reads_ds_kv_and_says_when_it_may_not(bench_for):
    """Token-id histories, unstreamed: P takes D's KV; a text history goes remote and says why."""
    bench = await bench_for("1P_1D", policy="pull")
    body = {"model": "fake", "max_tokens": 24, "return_token_ids": True}
    prompt = list(range(100, 200))

    first = await bench.post("/v1/completions", body | {"prompt": prompt})
    longer = [*prompt, *first.json()["choices"][0]["token_ids"], 7, 8, 9]
    second = await bench.post("/v1/completions", body | {"prompt": longer})
    chat = await bench.chat(follow_up(await bench.chat(USER)))

    assert (first.route, second.route) == ("remote", "pull")
    assert bench.engines["p0"]._counters["external_kv_transfer"] > 0
    assert (chat.route, chat.reason) == ("remote", "no_pull,no_kv_offered")


async def test_a_home_far_above_its_share_gives_conversations_away(bench_for):
    """Beyond 32 running and 1.5 times the mean, a later turn moves to the calmest home.

    Under any policy, so the one that is only asked would have done the same.
    """
    bench = await bench_for("1P_2D", policy="local", shadow="local")
    first = await bench.chat(USER)
    home = bench.router.upstreams[first.node]
    home.running.add(40)

    moved = await bench.chat(follow_up(first))
    receipt = (await bench.get("/ppd/decisions")).json()["decisions"][0]
    stays = await bench.chat(
        [*follow_up(first), assistant(moved), {"role": "user", "content": "x"}]
    )
    home.running.add(-40)

    assert (moved.route, moved.reason) == ("remote", "moved")
    assert receipt["shadow_reason"] == "moved"
    assert moved.node != first.node
    assert (stays.route, stays.node) == ("local", moved.node)


async def test_no_conversation_moves_while_nobody_could_compute_its_history(bench_for):
    """With P gone an overloaded home is the only one that can serve what it holds."""
    bench = await bench_for("1P_2D", policy="local")
    first = await bench.chat(USER)
    nodes = bench.router.upstreams
    nodes[first.node].running.add(100)
    nodes["p0"].alive = False

    second = await bench.chat(follow_up(first))

    assert (second.status, second.route, second.node) == (200, "local", first.node)


def assistant(reply):
    return {"role": "assistant", "content": reply.text()}


async def test_several_answers_in_one_request_are_computed_on_one_node(bench_for):
    """A hand-off's blocks can be read once, so n = 2 is not split."""
    bench = await bench_for("1P_1D", policy="remote")

    reply = await bench.chat(USER, n=2)

    assert (reply.route, reply.reason) == ("local", "alone")
    assert not bench.engines["p0"].served


async def test_the_counts_of_several_answers_teach_nothing_of_one(bench_for):
    """They are of all together: no length of an answer, and no context behind any."""
    bench = await bench_for("1P_1D", policy="local")
    first = await bench.chat(USER, n=4, max_tokens=40)
    second = await bench.chat(follow_up(first), max_tokens=1000)
    receipt = (await bench.get("/ppd/decisions?limit=1")).json()["decisions"][0]

    assert (second.route, second.reason) == ("local", "policy")
    assert receipt["output_tokens"] == OUTPUT_TOKENS
    assert receipt["context_tokens"] == first.json()["usage"]["prompt_tokens"]


async def test_a_mismatch_that_is_allowed_is_said_at_a_reload_too(bench_for, tmp_path, caplog):
    """As loudly as at the start."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    bench = await bench_for("1P_1D", policy=f"table:{path}", allow_mismatch=True)
    a_table(path, local=True, model="another")

    await bench.router.reload()

    assert any("MISMATCH" in record.message for record in caplog.records)


async def test_usage_is_kept_from_a_client_that_did_not_ask(bench_for):
    """The router counts for itself; the client sees what the engine alone would have sent."""
    bench = await bench_for("1R")

    plain = await bench.chat(USER, stream=True)
    asked = await bench.chat(USER, stream=True, stream_options={"include_usage": True})

    assert b'"usage":{' not in plain.body
    assert asked.events()[-1]["usage"]["completion_tokens"] == 8
    receipt = (await bench.get("/ppd/decisions")).json()["decisions"][-1]
    assert receipt["counted_output_tokens"] == 8


@pytest.mark.slow
async def test_a_storm_of_cancels_reaches_the_engine_and_leaves_no_trace(bench_for):
    """2,000 streams, half of them cancelled at random: each cancel is seen, gauges are 0."""
    import random

    from ppdbench.http.messages import Request
    from ppdbench.testing.fake import Service

    bench = await bench_for("1R", engine=lambda _: {"service": Service(2.0, 0.5)})
    body = {"model": "fake", "messages": USER, "max_tokens": 12, "stream": True}
    wire = Request.json("/v1/chat/completions", body).render(bench.origin)
    leaving = set(random.Random(1).sample(range(2000), 1000))

    class Ignore:
        ended = 0

        def on_head(self, *_): ...
        def on_body(self, *_): ...
        def on_end(self, *_):
            Ignore.ended += 1

        def on_failure(self, *_): ...

    exchanges = [bench.pool.start_raw(bench.origin, wire, Ignore()) for _ in range(2000)]
    await until(lambda: bench.total("in_flight") == 2000)
    for at in leaving:
        exchanges[at].cancel()
    await until(lambda: bench.total("in_flight") == 0)

    await until(lambda: bench.engines["r0"].cancelled == 1000)
    await until(lambda: Ignore.ended == 1000)
    assert bench.total("running:r0") == 0
    assert bench.total("outcome:client_gone") == 1000


async def until(condition, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_noted_before_its_client_can_go_on(bench_for, monkeypatch, stream):
    """Else the next turn could meet, at another worker, a conversation that nobody knows."""
    told = []
    bench = await bench_for()
    chooser = bench.router.services.chooser
    note, finish = chooser.note, Responder._finish

    monkeypatch.setattr(chooser, "note", lambda *a: (told.append("noted"), note(*a)))
    monkeypatch.setattr(Responder, "_finish", lambda self: (told.append("sent"), finish(self)))
    await bench.chat(USER, stream=stream)

    assert told[-2:] == ["noted", "sent"]
