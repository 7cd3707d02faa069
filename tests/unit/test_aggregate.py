"""From records to a point: each figure by hand on a small scene."""

from __future__ import annotations

import json
import math

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.runs.aggregate import Limits, Plan, aggregate, failed_point
from ppdbench.runs.points import PointKey, PointOutcome
from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.runs.store import point_line

KEY = PointKey("2P_2D", "local", "small", 1.0)
DEFAULT = Limits()


def turn(
    conversation="c0", number=1, *, at=0.0, ttft=0.1, tpot=0.01, out=11, **changes
) -> TurnRecord:
    fields = {
        "conversation": conversation,
        "turn": number,
        "route": Route.REMOTE if number == 1 else Route.LOCAL,
        "node": "d0",
        "scheduled_at_s": at,
        "sent_at_s": at,
        "first_token_at_s": at + ttft,
        "finished_at_s": at + ttft + tpot * (out - 1),
        "new_tokens": 64,
        "wanted_output_tokens": out,
        "output_tokens": out,
        "prompt_tokens": 64,
        "cached_tokens": 0,
    }
    return TurnRecord(**{**fields, **changes})


def failed(conversation="c9", at=0.0, outcome=Outcome.TIMEOUT) -> TurnRecord:
    return TurnRecord(conversation, 1, Route.REMOTE, "d0", at, at, outcome=outcome)


def point(records, plan=None, facts=None, limits=DEFAULT):
    chats = {record.conversation for record in records}
    plan = plan or Plan(len(chats), len(records), 10.0)
    return aggregate(KEY, 7, PointOutcome(records, facts or {}), plan, limits)


def test_latencies_by_class_are_the_definitions():
    """TTFT from the schedule and from the send, TPOT over tokens − 1, E2E to the last token."""
    late = turn("c0", 2, at=5.0, ttft=0.3, tpot=0.02, sent_at_s=5.1, context_tokens=75)

    result = point([turn(), late])

    assert result["turn1"]["ttft_s"]["mean"] == pytest.approx(0.1)
    assert result["turn2plus"]["ttft_s"]["p50"] == pytest.approx(0.3)
    assert result["turn2plus"]["ttft_sent_s"]["p50"] == pytest.approx(0.2)
    assert result["turn2plus"]["tpot_s"]["mean"] == pytest.approx(0.02)
    assert result["turn2plus"]["e2e_s"]["mean"] == pytest.approx(0.5)
    assert result["turn2plus"]["context_tokens"]["mean"] == 75
    assert result["all"]["n"] == 2


def test_a_one_token_answer_has_no_tpot():
    """Below two tokens there is nothing between them, and it does not pull the mean to 0."""
    result = point([turn(), turn("c1", out=1)])

    assert result["turn1"]["tpot_s"]["mean"] == pytest.approx(0.01)
    assert result["turn1"]["n"] == 2
    assert result["turn1"]["attainment"]["tpot_s"] == {"0.015": 1.0, "0.03": 1.0}
    assert result["turn1"]["attainment"]["ttft_s"]["0.5"] == 1.0


def test_failures_count_as_longer_than_everything_in_adjusted_percentiles():
    """10 of 100 fail: the plain p95 is of the 90 survivors, the adjusted one has no number."""
    records = [turn(f"c{i}", at=i / 100, ttft=0.1 + i / 1000) for i in range(90)]
    records += [failed(f"f{i}") for i in range(10)]

    result = point(records)

    assert result["success"] == result["success_conversations"] == pytest.approx(0.9)
    assert result["failures"] == {"timeout": 10}
    assert result["turn1"]["n"] == 90
    assert result["turn1"]["turns"] == 100
    assert result["turn1"]["ttft_s"]["p95"] == pytest.approx(0.1 + 84.55 / 1000)
    assert result["turn1"]["adjusted"]["ttft_s"]["p50"] == pytest.approx(0.1495)
    assert result["turn1"]["adjusted"]["ttft_s"]["p95"] is None
    assert result["turn1"]["attainment"]["ttft_s"]["0.2"] == pytest.approx(0.9)


def test_without_failures_adjusted_is_plain():
    """Both figures stand in every point, and agree where nothing failed."""
    ttft = point([turn(f"c{i}", ttft=i + 1.0) for i in range(5)])["all"]

    assert ttft["adjusted"]["ttft_s"]["p90"] == ttft["ttft_s"]["p90"] == pytest.approx(4.6)


def test_a_turn_never_sent_is_missed():
    """A conversation that broke at Turn 1 of three fails three turns, not one."""
    result = point([turn(), failed()], Plan(2, 4, 10.0))

    assert result["success"] == 0.25
    assert result["failures"] == {"timeout": 1, "never_sent": 2}


def test_an_ok_turn_without_a_token_is_a_failure():
    """An empty stream has no TTFT, whatever its driver called it."""
    result = point([turn(first_token_at_s=None, finished_at_s=None)])

    assert result["success"] == 0.0
    assert result["failures"] == {"no_first_byte": 1}
    assert result["all"]["ttft_s"]["mean"] is None


def test_throughput_is_of_the_window_and_the_drain_stands_apart():
    """Window 10 s: one answer ends inside, one is half out at its end, and drains for 5 s."""
    inside = turn("c0", at=0.0, ttft=1.0, tpot=0.1, out=11)
    across = turn("c1", at=8.0, ttft=1.0, tpot=0.6, out=11)
    last = turn("c2", at=10.0, ttft=1.0, out=1)

    result = point([inside, across, last])

    assert result["window_s"] == 10.0
    assert result["requests_per_s"] == pytest.approx(1 / 10)
    assert result["output_tokens_per_s"] == pytest.approx((11 + 1 + 10 / 6) / 10)
    assert result["with_drain"]["drain_s"] == pytest.approx(5.0)
    assert result["with_drain"]["requests_per_s"] == pytest.approx(3 / 15)
    assert result["with_drain"]["output_tokens_per_s"] == pytest.approx(23 / 15)


def test_goodput_counts_what_met_both_limits():
    """A slow first token and a slow stream both fall out; a one-token answer has only TTFT."""
    records = [
        turn("c0"),
        turn("c1", ttft=0.4),
        turn("c2", tpot=0.05),
        turn("c3", out=1),
        turn("c4", at=10.0, ttft=0.4),
    ]

    result = point(records, limits=Limits(ttft_s=0.2, tpot_s=0.03))

    assert result["goodput"] == {"ttft_s": 0.2, "tpot_s": 0.03, "requests_per_s": 0.2}


def test_inter_token_times_need_token_instants():
    """Unknown is null; where instants were kept, each gap counts."""
    kept = turn("c1", out=3, token_at_s=[0.1, 0.11, 0.14])

    assert point([turn()])["all"]["itl_s"] is None
    assert point([turn(), kept])["all"]["itl_s"]["mean"] == pytest.approx(0.02)


def test_warm_up_is_left_out():
    """A warm-up turn is no measurement."""
    assert point([turn(), turn("w", ttft=9.0, warm_up=True)])["all"]["ttft_s"]["mean"] == (
        pytest.approx(0.1)
    )


@pytest.mark.parametrize(
    ("cached", "retokenised", "lost"), [(96, 0, 0), (64, 32, 0), (16, 0, 80), (None, None, None)]
)
def test_a_cache_lost_inside_the_reply_is_retokenisation(cached, retokenised, lost):
    """Turn 1: prompt 64 and 40 out, so 96 of 103 tokens lie in whole blocks of 16."""
    first = turn(out=40)
    later = turn("c0", 2, at=5.0, prompt_tokens=168, cached_tokens=cached)

    result = point([first, later], Plan(1, 2, 10.0, block_tokens=16))

    assert (result["retokenised_tokens"], result["cache_lost_tokens"]) == (retokenised, lost)


def test_effective_new_tokens_are_what_the_server_computed():
    """Prompt − cached by the server, not what the workload planned."""
    later = turn("c0", 2, prompt_tokens=500, cached_tokens=384)

    assert point([turn(), later])["turn2plus"]["effective_new_tokens"]["mean"] == 116


def test_the_plan_comes_from_the_arrivals():
    """Turns and shared prefixes are summed; the window runs from the first to the last arrival."""
    chat = Conversation("a", (Turn(1, 1), Turn(1, 1)), context_tokens=9, shared_tokens=4)

    plan = Plan.of([Arrival(1.0, chat), Arrival(4.0, Conversation("b", (Turn(1, 1),)))])

    assert (plan.conversations, plan.turns, plan.window_s) == (2, 3, 3.0)
    assert plan.shared_tokens == {"a": 4}


def test_an_answer_that_came_whole_counts_its_tokens_and_has_no_limit_to_keep():
    """Pulls need unstreamed turns: their tokens are output, and their TTFT is unknown, not bad."""
    unstreamed = turn("c0", 1, out=11, first_token_at_s=None, whole=True)
    later = turn("c0", 2, at=5.0, out=11)

    result = point([unstreamed, later])

    assert result["output_tokens_per_s"] == pytest.approx(2.2)
    assert result["goodput"]["requests_per_s"] is None
    assert result["turn1"]["attainment"]["ttft_s"]["0.5"] is None
    assert result["all"]["attainment"]["ttft_s"]["0.5"] == 1.0
    assert result["all"]["attainment"]["tpot_s"]["0.03"] == 1.0


def test_a_failed_point_is_a_whole_point_with_its_cause():
    """It has every field, no number it does not know, and never votes."""
    result = failed_point(KEY, 7, "d0 died", Plan(5, 10, 10.0))

    assert "engine_failed" in result["validity"]
    assert result["cause"] == "d0 died"
    assert result["success"] == 0.0
    assert result["all"]["ttft_s"]["p99"] is None
    assert result.keys() - {"cause"} == point([turn()]).keys()


def test_a_line_is_canonical_json():
    """Sorted keys, one line, finite numbers: equal points are equal bytes."""
    line = point_line(point([turn(), failed()]))

    document = json.loads(line, parse_constant=pytest.fail)
    assert line.endswith(b"}\n")
    assert list(document) == sorted(document)
    assert math.isfinite(document["all"]["ttft_s"]["mean"])
