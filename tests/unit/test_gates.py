"""Every gate has a scene that fires it and one beside it that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.runs.aggregate import Plan, aggregate
from ppdbench.runs.gates import GATES, Evidence, validity
from ppdbench.runs.points import PointKey, PointOutcome
from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.runs.validity import Validity

GOOD = Evidence(success=1.0, later_turns=30, median_ttft_s=0.1, path_proven=True)


def test_a_good_point_has_no_code_and_every_code_has_a_gate():
    """An empty list is good, and no code can be forgotten."""
    assert validity(GOOD) == []
    assert set(GATES) == set(Validity)


@pytest.mark.parametrize(
    ("fires", "holds", "code"),
    [
        ({"send_lag_p99_s": 0.0101}, {"send_lag_p99_s": 0.0099}, "client_limited"),
        ({"loop_lag_p99_s": 0.0101}, {"loop_lag_p99_s": 0.0099}, "client_limited"),
        (
            {"send_lag_p99_s": 0.021, "median_ttft_s": 1.0},
            {"send_lag_p99_s": 0.019, "median_ttft_s": 1.0},
            "client_limited",
        ),
        ({"contaminated_turns": 1}, {"contaminated_turns": 0}, "cache_contaminated"),
        ({"path_proven": False}, {"path_proven": None}, "path_unproven"),
        ({"wrong_length_share": 0.011}, {"wrong_length_share": 0.01}, "wrong_lengths"),
        ({"engine_failed": "d0 died"}, {"engine_failed": None}, "engine_failed"),
        ({"success": 0.949}, {"success": 0.95}, "errors"),
        ({"later_turns": 29}, {"later_turns": 30}, "too_few"),
    ],
)
def test_a_gate_fires_just_beyond_its_limit_and_not_at_it(fires, holds, code):
    """The limits are those of docs/metrics.md, and unknown evidence fires nothing."""
    assert validity(replace(GOOD, **fires)) == [code]
    assert validity(replace(GOOD, **holds)) == []


def records(count=40, **second) -> list[TurnRecord]:
    def turn(number: int, i: int) -> TurnRecord:
        at = i + 10.0 * number
        return TurnRecord(
            f"c{i}", number, Route.LOCAL, "d0", at, at,
            first_token_at_s=at + 0.1, finished_at_s=at + 0.2, wanted_output_tokens=8,
            output_tokens=8, prompt_tokens=64, cached_tokens=0 if number == 1 else 48,
        )  # fmt: skip

    made = [turn(number, i) for i in range(count) for number in (1, 2)]
    for name, value in second.items():
        setattr(made[0], name, value)
    return made


def codes(made, shared=None, **facts):
    plan = Plan(len(made) // 2, len(made), 40.0, shared or {})
    point = aggregate(PointKey("2P_2D", "local", "w", 1.0), 1, PointOutcome(made, facts), plan)
    return point["validity"]


def test_records_of_a_good_point_fire_nothing():
    """The scenes below differ from this one in one thing each."""
    assert codes(records()) == []


def test_a_warm_first_turn_contaminates_unless_the_plan_shares_the_prefix():
    """One Turn 1 with cached tokens is enough; a shared system prompt is no contamination."""
    assert codes(records(cached_tokens=16)) == ["cache_contaminated"]
    assert codes(records(cached_tokens=16), {"c0": 16}) == []
    assert codes(records(cached_tokens=None)) == []


def test_a_chat_template_may_be_cached_and_the_message_may_not():
    """64 tokens of which the workload planned 40: up to 24 are the template's."""
    assert codes(records(cached_tokens=16, new_tokens=40)) == []
    assert codes(records(cached_tokens=32, new_tokens=40)) == ["cache_contaminated"]


def test_people_who_begin_alike_share_a_prefix_within_their_point():
    """Two equal openings may hit each other's KV; a third that only begins with I may not."""
    texts = ["I want you to act as a poet.", "I want you to act as a pilot.", "Is it late?"]
    arrivals = [
        Arrival(0.0, Conversation(f"c{i}", (Turn(8, 8, text=text),)))
        for i, text in enumerate(texts)
    ]

    shared = Plan.of(arrivals).shared_tokens

    assert shared["c0"] == shared["c1"] == len("\0I want you to act as a p")
    assert shared["c2"] == len("\0I")


def test_ids_that_begin_alike_are_counted_exactly():
    """Token for token, the context before Turn 1 included."""
    talks = [
        Conversation("a", (Turn(2, 1, token_ids=(1, 2)),), 1, context_token_ids=(9,)),
        Conversation("b", (Turn(2, 1, token_ids=(1, 3)),), 1, context_token_ids=(9,)),
    ]

    assert Plan.of([Arrival(0.0, talk) for talk in talks]).shared_tokens == {"a": 2, "b": 2}


def test_lengths_are_compared_where_the_server_counted():
    """One of 80 is over 1 %; an unknown length is no wrong one."""
    assert codes(records(output_tokens=7)) == ["wrong_lengths"]
    assert codes(records(outcome=Outcome.WRONG_LENGTH)) == ["wrong_lengths"]
    assert codes(records(output_tokens=None)) == []
    assert codes(records(200, output_tokens=7)) == []


def test_a_late_client_shows_in_the_records_too():
    """Where the driver gave no figure, sent − scheduled speaks; its own figure goes first."""
    late = records(10, sent_at_s=10.09)

    assert "client_limited" in codes(late)
    assert "client_limited" not in codes(late, send_lag_p99_s=0.001)


def test_facts_of_the_backend_reach_the_gates():
    """Path proof and engine failure come from the backend, not from records."""
    assert codes(records(), path_proven=False) == ["path_unproven"]
    assert codes(records(), engine_failed="p0 gone") == ["engine_failed"]


def test_broken_turns_are_errors_and_may_leave_too_few():
    """Flags that build-table weighs, both from the same records."""
    broken = records(31)
    for record in broken[1:8:2]:
        record.outcome = Outcome.BROKEN_STREAM

    assert codes(broken) == ["errors", "too_few"]


def test_a_prompt_of_ids_that_the_server_counts_differently_is_a_wrong_length():
    """Beyond max(2, 1 %); a prompt of text has no planned length, so the server's count rules."""
    made = records()
    for record in made:
        record.new_tokens = 64
        record.prompt_tokens = 66
    within = codes(made, prompts_are_ids=True)
    for record in made[:2]:
        record.prompt_tokens = 67

    assert within == []
    assert codes(made, prompts_are_ids=True) == ["wrong_lengths"]
    assert codes(made, prompts_are_ids=False) == []
