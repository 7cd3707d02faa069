"""The cleaning rules of docs/workloads.md, one by one, and the books that go with them."""

from __future__ import annotations

import orjson
import pytest

from ppdbench.workload.account import Account
from ppdbench.workload.dataset import read_chats
from ppdbench.workload.source import find_source
from ppdbench.workload.unwrap import text_of


@pytest.fixture
def read(tmp_path):
    """Write entries as a ShareGPT file and read them back cleaned, books checked."""

    def run(*entries):
        path = tmp_path / "chats.json"
        path.write_bytes(orjson.dumps(list(entries)))
        account = Account()
        chats = list(read_chats(find_source(str(path)), account))
        assert account.conversations.kept == len(chats)
        assert account.turns.kept == sum(chat.turns for chat in chats)
        assert account.messages.kept >= 2 * account.turns.kept
        return chats, account

    return run


def chat(name, *said):
    roles = {"h": "human", "g": "gpt", "s": "system", "t": "tool"}
    messages = [{"from": roles.get(role, role), "value": text} for role, text in said]
    return {"id": name, "conversations": messages}


def test_turns_are_requests_with_their_replies(read):
    """Human and gpt alternate into turns in order."""
    chats, _ = read(chat("a", ("h", "1"), ("g", "2"), ("h", "3"), ("g", "4")))

    assert (chats[0].texts, chats[0].replies) == (["1", "3"], ["2", "4"])


@pytest.mark.parametrize("role", ["chatgpt", "bing", "bard", "assistant", "GPT "])
def test_every_name_of_the_assistant_is_mapped(read, role):
    """gpt, chatgpt, bing, bard and assistant are one role, whatever the case."""
    chats, _ = read(chat("a", ("user", "1"), (role, "2")))

    assert chats[0].replies == ["2"]


def test_a_leading_system_message_is_context_and_no_turn(read):
    """It stands before Turn 1 with its role."""
    chats, _ = read(chat("a", ("s", "be kind"), ("h", "1"), ("g", "2")))

    assert (chats[0].context_text, chats[0].context_role, chats[0].turns) == (
        "be kind",
        "system",
        1,
    )


def test_a_leading_assistant_message_is_kept_as_context(read):
    """A reply to a request that was cut away is what Turn 1 stands on."""
    chats, _ = read(chat("a", ("g", "0"), ("h", "1"), ("g", "2")))

    assert (chats[0].context_text, chats[0].context_role) == ("0", "assistant")


def test_an_empty_message_is_dropped_with_its_pair(read):
    """Neither side of the pair stays; the turn after it stands on the turn before it."""
    chats, account = read(
        chat("a", ("h", "1"), ("g", "2"), ("h", " "), ("g", "4"), ("h", "5"), ("g", "6"))
    )

    assert chats[0].texts == ["1", "5"]
    assert account.messages.dropped == {"blank": 1, "pair_of_blank": 1}


def test_two_users_in_a_row_are_joined(read):
    """One request, in order; the same for replies."""
    chats, _ = read(chat("a", ("h", "1"), ("h", "2"), ("g", "3"), ("g", "4")))

    assert (chats[0].texts, chats[0].replies) == (["1\n\n2"], ["3\n\n4"])


def test_a_tool_result_is_input(read):
    """What a tool says is new tokens for the model, like a user's."""
    chats, _ = read(chat("a", ("h", "1"), ("g", "call"), ("t", "42"), ("g", "done")))

    assert chats[0].texts == ["1", "42"]


def test_a_last_request_without_reply_is_no_turn(read):
    """Nobody knows how long its reply would have been."""
    chats, account = read(chat("a", ("h", "1"), ("g", "2"), ("h", "3")))

    assert chats[0].turns == 1
    assert account.messages.dropped == {"unanswered": 1}


def test_late_system_messages_and_unknown_roles_are_left_out_and_booked(read):
    """Only a leading system message is context; a role nobody knows is no side."""
    chats, account = read(chat("a", ("h", "1"), ("s", "x"), ("narrator", "y"), ("g", "2")))

    assert chats[0].replies == ["2"]
    assert account.messages.dropped == {"late_system": 1, "unknown_role": 1}


def test_parts_of_one_chat_are_joined_in_the_order_of_their_numbers(read):
    """id_0, id_1, … id_10 wherever they stand; every part but one counts as merged."""
    parts = [chat(f"x_{i}", ("h", f"q{i}"), ("g", f"a{i}")) for i in (10, 2, 0, 1)]

    chats, account = read(*parts, chat("y", ("h", "1"), ("g", "2")))

    assert [c.texts for c in chats] == [["q0", "q1", "q2", "q10"], ["1"]]
    assert account.conversations.dropped == {"merged": 3}


def test_a_part_that_begins_in_a_reply_continues_the_part_before(read):
    """ShareGPT's splitter cuts between request and reply, too."""
    chats, _ = read(chat("x_1", ("g", "b"), ("h", "c"), ("g", "d")), chat("x_0", ("h", "a")))

    assert (chats[0].texts, chats[0].replies) == (["a", "c"], ["b", "d"])


def test_of_equal_ids_the_first_stays(read):
    """Whatever the second says."""
    chats, account = read(chat("a", ("h", "1"), ("g", "2")), chat("a", ("h", "9"), ("g", "9")))

    assert [c.texts for c in chats] == [["1"]]
    assert account.conversations.dropped == {"duplicate_id": 1}


def test_what_cannot_be_a_conversation_is_dropped_for_what_it_is(read):
    """Empty, without a turn, malformed: three reasons."""
    _, account = read(
        chat("e"), chat("n", ("g", "only a reply")), {"id": "m"}, 7,
        {"id": "m2", "conversations": [{"from": "human", "value": 3}]},
    )  # fmt: skip

    assert account.conversations.dropped == {"empty": 1, "no_turn": 1, "malformed": 3}


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "text", "text": "hi"}],
        [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "hi"}],
        '[{"type": "text", "text": "hi"}]',
        '{"role": "user", "content": "hi"}',
        {"content": "hi"},
    ],
)
def test_wrapped_content_becomes_its_text(read, value):
    """Lists of parts and JSON in a string are exporters' wrappings."""
    chats, _ = read(chat("a", ("h", value), ("g", "2")))

    assert chats[0].texts == ["hi"]


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "[broken", '{"text": "x", "b": 2}'])
def test_json_that_a_person_pasted_stays_as_it_is(read, text):
    """Only the shapes that exporters make are unwrapped."""
    chats, _ = read(chat("a", ("h", text), ("g", "2")))

    assert chats[0].texts == [text]


def test_a_message_that_is_a_json_string_is_read(read):
    """Some exports store each turn as JSON in a string."""
    turns = ['{"from": "human", "value": "1"}', '{"from": "gpt", "value": "2"}']

    chats, _ = read({"id": "a", "conversations": turns})

    assert chats[0].texts == ["1"]


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    """JSON may hold what UTF-8 cannot; it must not stop a load."""
    assert text_of("x\ud83d") == "x\ufffd"
