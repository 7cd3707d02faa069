"""WildChat's schema, exactly counted, from files that the test makes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppdbench.core.errors import WorkloadError
from ppdbench.workload.account import Account
from ppdbench.workload.dataset import prepare_into, read_chats
from ppdbench.workload.prepared import read_prepared
from ppdbench.workload.read_parquet import read_hub
from ppdbench.workload.select import Selection, select
from ppdbench.workload.source import find_source

MESSAGE = pa.struct(
    {
        "content": pa.string(),
        "country": pa.string(),
        "header": pa.struct({"accept-language": pa.string(), "user-agent": pa.string()}),
        "language": pa.string(),
        "redacted": pa.bool_(),
        "role": pa.string(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "toxic": pa.bool_(),
        "turn_identifier": pa.int64(),
    }
)
SCHEMA = pa.schema(
    {
        "conversation_hash": pa.string(),
        "model": pa.string(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "conversation": pa.list_(MESSAGE),
        "turn": pa.int64(),
        "language": pa.string(),
        "toxic": pa.bool_(),
        "redacted": pa.bool_(),
    }
)
START = datetime(2024, 1, 1, tzinfo=UTC)


def row(name, *roles, language="English", toxic=False, redacted=False, model="gpt-4"):
    """A row whose messages have these roles; every message is stamped a minute after the last."""
    messages = [
        {"role": role, "content": f"{role} {i}", "timestamp": START + timedelta(minutes=i)}
        for i, role in enumerate(roles)
    ]
    return {
        "conversation_hash": name, "model": model, "timestamp": START, "conversation": messages,
        "turn": len(roles) // 2, "language": language, "toxic": toxic, "redacted": redacted,
    }  # fmt: skip


PAIR = ("user", "assistant")
ROWS = [
    row("plain", *PAIR),
    row("three", *PAIR * 3, language="French", model="gpt-3.5-turbo"),
    row("toxic", *PAIR, toxic=True),
    row("redacted", *PAIR * 2, redacted=True, language="German"),
    row("system", "system", *PAIR),
    row("assistant first", "assistant", *PAIR * 2),
    row("empty"),
    row("forty", *PAIR * 40, language="Chinese"),
    row("plain", *PAIR * 5),
    row("unanswered", "user"),
]


@pytest.fixture
def wildchat(tmp_path):
    """Two shards in a folder."""
    folder = tmp_path / "wildchat"
    folder.mkdir()
    for number, rows in enumerate((ROWS[:6], ROWS[6:])):
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        pq.write_table(table, folder / f"train-{number}.parquet")
    return folder


def read(source, selection=None):
    account = Account()
    chats = read_chats(find_source(str(source)), account)
    return {chat.id: chat for chat in select(chats, selection or Selection(), account)}, account


def test_every_row_is_kept_or_dropped_for_a_reason(wildchat):
    """Ten rows: seven kept, one empty, one repeated, one without a reply."""
    chats, account = read(wildchat)

    assert account.conversations.to_json() == {
        "read": 10,
        "kept": 7,
        "dropped": {"duplicate_id": 1, "empty": 1, "no_turn": 1},
    }
    assert {name: chat.turns for name, chat in chats.items()} == {
        "plain": 1, "three": 3, "toxic": 1, "redacted": 2, "system": 1, "assistant first": 2,
        "forty": 40,
    }  # fmt: skip
    assert account.messages.to_json() == {
        "read": 2 * 50 + 2 + 10 + 1,
        "kept": 2 * 50 + 2,
        "dropped": {"in_dropped_conversation": 10, "unanswered": 1},
    }


def test_the_hub_reader_sees_the_same_rows(wildchat):
    """Through `datasets`, streaming; a local folder stands in for a hub name, so no network."""
    account = Account()

    raws = list(read_hub(str(wildchat), account))

    assert [raw.id for raw in raws] == [row["conversation_hash"] for row in ROWS]
    assert account.messages.read == sum(len(row["conversation"]) for row in ROWS)
    assert raws[1].messages[1].at_s == (START + timedelta(minutes=1)).timestamp()


def test_leading_system_and_assistant_messages_are_context(wildchat):
    """With their roles, and no turns."""
    chats, _ = read(wildchat)

    assert (chats["system"].context_text, chats["system"].context_role) == ("system 0", "system")
    assert chats["assistant first"].context_role == "assistant"


def test_message_times_give_the_pauses(wildchat):
    """From the last reply to the next request: a minute here; nothing before Turn 1."""
    chats, _ = read(wildchat)

    assert chats["three"].think_s == [0.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("selection", "kept", "dropped"),
    [
        (Selection(drop_toxic=True), 6, {"toxic": 1}),
        (Selection(drop_redacted=True), 6, {"redacted": 1}),
        (Selection(languages=("english",)), 4, {"language": 3}),
        (Selection(languages=("French", "German")), 2, {"language": 5}),
        (Selection(models=("gpt-3.5-turbo",)), 1, {"model": 6}),
        (Selection(min_turns=2), 4, {"too_few_turns": 3}),
        (Selection(sample=3, seed=1), 3, {"not_sampled": 4}),
    ],
)
def test_what_a_selection_drops_is_booked_under_its_name(wildchat, selection, kept, dropped):
    """Toxic and redacted rows stay unless a flag says otherwise."""
    chats, account = read(wildchat, selection)
    before = {"duplicate_id": 1, "empty": 1, "no_turn": 1}

    assert len(chats) == account.conversations.kept == kept
    assert account.conversations.dropped == before | dropped


def test_a_cut_conversation_keeps_its_beginning(wildchat):
    """Forty turns cut to ten are the first ten; the thirty are booked."""
    chats, account = read(wildchat, Selection(max_turns=10))

    assert chats["forty"].texts == [f"user {2 * i}" for i in range(10)]
    assert account.turns.dropped["beyond_max_turns"] == 30


def test_a_prepared_file_holds_the_same_and_says_what_it_is(wildchat, tmp_path):
    """Written once, read back with texts, counts, account and selection."""
    file = tmp_path / "w.parquet"
    selection = Selection(min_turns=2, languages=("English", "French"))

    info = prepare_into(file, str(wildchat), "default", selection).info
    chats = {chat.id: chat for chat in read_prepared(file, content=True)}

    assert set(chats) == {"three", "assistant first"}
    assert chats["three"].texts == ["user 0", "user 2", "user 4"]
    assert all(min(chat.new_tokens + chat.output_tokens) >= 2 for chat in chats.values())
    assert info.account.conversations.kept == 2
    assert info.origin.selection["min_turns"] == 2


def test_equal_input_gives_an_equal_digest_and_any_change_another(wildchat, tmp_path):
    """The digest is of what is in the file, wherever it lies and whenever it was made."""
    digests = [
        prepare_into(tmp_path / name, str(wildchat), "default", selection).info.digest
        for name, selection in (
            ("a.parquet", Selection()),
            ("b.parquet", Selection()),
            ("c.parquet", Selection(max_turns=39)),
        )
    ]

    assert digests[0] == digests[1] != digests[2]


def test_a_sample_does_not_depend_on_the_order_of_the_rows(wildchat, tmp_path):
    """Lots are drawn by id."""
    backwards = tmp_path / "back.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS[:-2][::-1], schema=SCHEMA), backwards)

    there, _ = read(wildchat, Selection(sample=4, seed=7))
    back, _ = read(backwards, Selection(sample=4, seed=7))

    assert list(there) == list(back)


def test_no_parquet_without_a_conversation(tmp_path):
    """The error names the columns there are and what was expected."""
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "reply": ["b"]}), path)

    with pytest.raises(WorkloadError, match="no column `conversation`; it has prompt, reply"):
        read(path)


def test_a_shard_that_was_cut_off_is_an_error(wildchat):
    """Parquet keeps its index at the end; nothing of a cut file can be trusted."""
    shard = wildchat / "train-1.parquet"
    shard.write_bytes(shard.read_bytes()[:-40])

    with pytest.raises(WorkloadError, match=r"train-1\.parquet"):
        read(wildchat)


def test_nothing_is_left_behind_when_preparing_fails(wildchat, tmp_path):
    """The output file appears whole or not at all, and no temporary file stays."""
    shard = wildchat / "train-1.parquet"
    shard.write_bytes(shard.read_bytes()[:-40])
    into = tmp_path / "out"

    with pytest.raises(WorkloadError):
        prepare_into(into / "w.parquet", str(wildchat), "default", Selection())

    assert list(into.iterdir()) == []
