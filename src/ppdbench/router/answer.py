"""Reading an answer on its way through: text, tool calls and the server's counts."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from msgspec import Struct

from ppdbench.cluster.nixl import cached_tokens, count_of
from ppdbench.http.reply import CUT_SHORT
from ppdbench.router.history import Answer

_TEXT = {
    "content": re.compile(rb'"content":\s*"([^"\\]*(?:\\.[^"\\]*)*)"'),
    "text": re.compile(rb'"text":\s*"([^"\\]*(?:\\.[^"\\]*)*)"'),
}
"""Inside a JSON string every quote is escaped, so these never match there."""

_TOKEN = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|arguments)":\s*"[^"]|"tool_calls":\s*\[\s*\{'
)
_PARSED = re.compile(rb'"(?:tool_calls|token_ids)"')
"""Only events with these need to be understood to know the answer."""

_REASONING = re.compile(rb'"reasoning(?:_content)?":\s*"[^"]')
_USAGE = b'"usage"'
_DONE = b"[DONE]"
_FINISH = b'"finish_reason":'
"""In a JSON string there is no bare quote, so this never stands in a text."""

_CUT_SHORT = tuple(b'"%b"' % reason.encode() for reason in CUT_SHORT)
_REASON_BYTES = 16
_BATCH_BYTES = 16_384


class Counted(Struct, frozen=True):
    """A server's own counts of one answer; ``None`` where it said nothing."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


NOTHING = Counted()


def carries_token(data: bytes) -> bool:
    """Whether a piece of a stream holds text, reasoning or a tool call; a role alone is none."""
    return _TOKEN.search(data) is not None


def events(data: bytes) -> Iterator[bytes]:
    """The one-line ``data`` of each event in whole events."""
    for line in data.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def is_usage_alone(event: bytes) -> bool:
    """Whether an event is the counts that follow an answer and nothing else."""
    document = _parsed(event)
    return document.get("choices") == [] and isinstance(document.get("usage"), dict)


def speaks_of_usage(data: bytes) -> bool:
    """Whether counts may be in whole events; sought from the end, where they stand."""
    return data.rfind(_USAGE) >= 0


def without_usage(data: bytes) -> bytes:
    """Whole events less the one that only a request with ``include_usage`` gets.

    Only events that speak of a usage are looked at: all the others are tokens.
    """
    separator = b"\r\n\r\n" if b"\r" in data and b"\r\n\r\n" in data else b"\n\n"
    kept, done = [], 0
    at = data.find(_USAGE)
    while at >= 0:
        before, behind = data.rfind(separator, done, at), data.find(separator, at)
        begin = done if before < 0 else before + len(separator)
        end = len(data) if behind < 0 else behind + len(separator)
        if any(map(is_usage_alone, events(data[begin:end]))):
            kept.append(data[done:begin])
            done = end
        at = data.find(_USAGE, end)
    kept.append(data[done:])
    return b"".join(kept)


class StreamReader:
    """Collects a stream's answer in batches, so that a long one is not held in raw bytes.

    ``ended_well`` says, after ``end``, whether the stream said that it was over: by ``[DONE]``,
    or by a finish reason, as some engines leave it at that. One that just stops may lack some text,
    and one that the engine gave up does, for all its ``[DONE]``.
    """

    __slots__ = (
        "_done", "_field", "_finish", "_ids", "_raw", "_raw_bytes", "_reasoned", "_text", "_tools",
        "counted",
    )  # fmt: skip

    def __init__(self, field: str) -> None:
        self._field = field
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._text: list[bytes] = []
        self._tools: list[str] = []
        self._ids: list[Any] = []
        self._reasoned = False
        self.counted = NOTHING
        self._finish = b""
        self._done = False

    def feed(self, data: bytes) -> None:
        """Whole events."""
        self._raw.append(data)
        self._raw_bytes += len(data)
        if self._raw_bytes > _BATCH_BYTES:
            self._digest()

    def end(self) -> Answer:
        """What was answered; ``counted`` is filled too."""
        self._digest()
        tokens = self.counted.output_tokens
        ids = _token_ids(self._ids)
        text = _unescaped(b"".join(self._text))
        return Answer(text, ",".join(self._tools), tokens, ids, self._reasoned)

    def _digest(self) -> None:
        data = b"".join(self._raw)
        self._raw.clear()
        self._raw_bytes = 0
        self._text += _TEXT[self._field].findall(data)
        self._finish = _last_finish(data) or self._finish
        self._done = self._done or _says_done(data)
        if not self._reasoned and b'"reasoning' in data:
            self._reasoned = _REASONING.search(data) is not None
        if _PARSED.search(data):
            for event in events(data):
                self._take(_parsed(event))
        at = data.rfind(b'"usage":')
        if at >= 0:
            self._take_usage(data, at)

    def _take(self, document: Mapping[str, Any]) -> None:
        for choice in _dicts(document.get("choices")):
            delta = choice.get("delta")
            self._tools += tool_ids(delta if isinstance(delta, dict) else {})
            ids = choice.get("token_ids")
            if isinstance(ids, list):
                self._ids += ids

    @property
    def ended_well(self) -> bool:
        if self._finish.startswith(_CUT_SHORT):
            return False
        return self._done or self._finish[:1] == b'"'

    def _take_usage(self, data: bytes, at: int) -> None:
        start = max(data.rfind(b"\ndata:", 0, at) + 1, 0)
        for event in events(data[start:]):
            usage = _parsed(event).get("usage")
            if isinstance(usage, dict):
                self.counted = read_usage(usage)


def _says_done(data: bytes) -> bool:
    """Sought from the end, where it stands; in a text it is no line of its own."""
    at = data.rfind(_DONE)
    return at >= 0 and data[data.rfind(b"\n", 0, at) + 1 : at].rstrip() == b"data:"


def _last_finish(data: bytes) -> bytes:
    """The last finish reason with its quotes, and what follows; ``null`` is none yet."""
    at = data.rfind(_FINISH)
    begin = at + len(_FINISH)
    return data[begin : begin + _REASON_BYTES].lstrip() if at >= 0 else b""


def is_cut_short(body: bytes) -> bool:
    """Whether the engine gave up an unstreamed answer, for all its status 200."""
    return _last_finish(body).startswith(_CUT_SHORT)


def read_whole(body: bytes) -> tuple[Answer, Counted]:
    """An unstreamed answer and its counts."""
    document = _parsed(body)
    usage = document.get("usage")
    counted = read_usage(usage) if isinstance(usage, dict) else NOTHING
    choice = _first_dict(document.get("choices"))
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    text = choice.get("text") or message.get("content") or ""
    answer = Answer(
        text if isinstance(text, str) else "",
        ",".join(tool_ids(message)) if "tool_calls" in message else "",
        counted.output_tokens,
        _token_ids(choice["token_ids"]) if "token_ids" in choice else (),
        bool(message.get("reasoning_content") or message.get("reasoning")),
    )
    return answer, counted


def read_usage(usage: Mapping[str, Any]) -> Counted:
    """The ``usage`` object of an answer."""
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Counted(count_of(prompt), count_of(output), cached_tokens(usage))


def tool_ids(message: Mapping[str, Any]) -> list[str]:
    """Ids of a message's tool calls, as the next turn's history will show them."""
    return [str(call["id"]) for call in _dicts(message.get("tool_calls")) if call.get("id")]


def _token_ids(ids: object) -> tuple[int, ...]:
    """``ids`` where they can be tokens, else none: whatever a node sent."""
    try:
        return tuple(array("q", ids)) if isinstance(ids, list) else ()
    except (TypeError, OverflowError):
        return ()


def _first_dict(value: object) -> dict[str, Any]:
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            return item
    return {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _unescaped(escaped: bytes) -> str:
    """Pieces of one JSON string put together again, so that split surrogate pairs are whole."""
    try:
        text = orjson.loads(b'"' + escaped + b'"')
    except orjson.JSONDecodeError:
        return escaped.decode("utf-8", "replace")
    return text if isinstance(text, str) else ""
