"""What stands in a chat's messages, however a client writes it: their bytes, lengths and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

from ppdbench.router.documents import written
from ppdbench.router.memory import ANSWERED, Note

CHECK_BITS = 0xFFFFFFFF

MEDIA_LENGTH = 2048
"""What an image or another part that is no text counts for, in characters: some 500 tokens."""


def part_of(kind: bytes, raw: bytes) -> bytes:
    """Length first, so that parts cannot run into each other."""
    return b"%b\x1f%d\x1f%b" % (kind, len(raw), raw)


def canonical(value: object) -> bytes:
    """Equal content gives equal bytes, whether it came as text or as a list of text parts."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    if value is None:
        return b""
    if isinstance(value, list) and all(map(_is_text_part, value)):
        return "".join(part["text"] for part in value).encode("utf-8", "replace")
    return written(value, orjson.OPT_SORT_KEYS)


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def length_of(content: object) -> int:
    """Bytes of a text; of an image and its like they would tell nothing of its tokens."""
    if isinstance(content, str):
        return len(content) if content.isascii() else len(canonical(content))
    if isinstance(content, list):
        return sum(length_of(p["text"]) if _is_text_part(p) else MEDIA_LENGTH for p in content)
    return len(canonical(content))


def length_in(message: object, raw: bytes) -> int:
    """Of a message whose content is ``raw``."""
    content = message.get("content") if isinstance(message, dict) else None
    return length_of(content) if isinstance(content, list) else len(raw)


def content_and_length(message: object) -> tuple[bytes, int]:
    """As in :func:`role_and_content`, with no more than a look at a plain question."""
    if isinstance(message, dict) and message.get("role") == "user":
        content = message.get("content")
        if isinstance(content, str):
            raw = content.encode("utf-8", "replace")
            return raw, len(raw)
    raw = role_and_content(message)[1]
    return raw, length_in(message, raw)


def role_and_content(message: object) -> tuple[bytes, bytes]:
    """Of anything that stands in ``messages``; what is no message is the engine's to refuse."""
    if not isinstance(message, dict):
        return b"", canonical(message)
    role = message.get("role")
    if role == "assistant":
        return b"assistant", shown_answer(message)
    return canonical(role), canonical(message.get("content"))


def is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def shown_answer(message: Mapping[str, Any]) -> bytes:
    """An answer as a history shows it."""
    content = message.get("content")
    text = content if isinstance(content, str) else canonical(content).decode("utf-8", "replace")
    return answer_bytes(text, _tool_ids(message))


def answer_bytes(content: str, tools: str) -> bytes:
    """Clients trim answers when they send them back, so white space at the ends does not count."""
    return f"{content.strip()}\x1e{tools}".encode("utf-8", "replace")


def _tool_ids(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return ""
    return ",".join(str(call.get("id")) for call in calls if isinstance(call, dict))


def check_of(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw) & CHECK_BITS


def _text(message: object) -> str:
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if _is_text_part(part))
    return canonical(content).decode("utf-8", "replace")


def texts_behind(messages: list[Any], note: Note) -> list[str]:
    """A note of turn n stands behind the nth answer, or before it where it was never seen."""
    answers = [at for at, message in enumerate(messages) if is_answer(message)]
    if note.turn > len(answers):
        return []
    begin = answers[note.turn - 1] + bool(note.flags & ANSWERED)
    return [_text(message) for message in messages[begin:]]


def answers_a_tool_call(body: Mapping[str, Any]) -> bool:
    """Whether the model goes on from a tool's result, and nobody has asked anything new.

    An application's reminder behind the result asks nothing.
    """
    messages = body.get("messages")
    return isinstance(messages, list) and _is_behind_a_tool(messages)


def _is_behind_a_tool(messages: list[Any]) -> bool:
    for message in reversed(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer"):
            return role in ("tool", "function")
    return False


def drops_reasoning(messages: list[Any]) -> bool:
    """Whether a template takes out reasoning that it kept as long as the model called tools."""
    return not _is_behind_a_tool(messages) and any(
        message.get("reasoning_content") or message.get("reasoning")
        for message in filter(is_answer, messages)
    )


def answers_before_last_asked(messages: list[Any]) -> int:
    """How many answers stand before the last question that the history shows an answer to."""
    answers = asked = before = 0
    for message in messages:
        if is_answer(message):
            before = asked
            answers += 1
        elif isinstance(message, dict) and message.get("role") == "user":
            asked = answers
    return before
