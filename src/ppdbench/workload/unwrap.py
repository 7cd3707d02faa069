"""From the shapes that exports take to a RawChat."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from ppdbench.workload.chat import Message, RawChat
from ppdbench.workload.nesting import is_deep

_LISTS = ("conversations", "conversation", "messages", "items")
_IDS = ("id", "conversation_hash", "conversation_id")
_ROLE_KEYS = ("from", "role")
_TEXT_KEYS = ("value", "content", "text")
_WRAPPER_KEYS = {*_ROLE_KEYS, *_TEXT_KEYS, "type"}


def raw_chat(entry: object, index: int) -> RawChat:
    """Never raises: what cannot be read is a RawChat with a ``problem``."""
    if not isinstance(entry, dict):
        return RawChat(f"row-{index}", problem="malformed")
    listed = next((entry[key] for key in _LISTS if key in entry), None)
    listed = _from_json_string(listed)
    raw = RawChat(
        _id_of(entry, index),
        language=_text_or_none(entry.get("language")),
        model=_text_or_none(entry.get("model")),
        toxic=bool(entry.get("toxic")),
        redacted=bool(entry.get("redacted")),
    )
    if not isinstance(listed, list):
        raw.problem = "malformed"
        return raw
    messages = [message_of(_from_json_string(item)) for item in listed]
    if any(message is None for message in messages):
        raw.problem = "malformed"
        return raw
    raw.messages = [message for message in messages if message is not None]
    return raw


def message_of(item: object) -> Message | None:
    if not isinstance(item, dict):
        return None
    role = next((item[key] for key in _ROLE_KEYS if key in item), None)
    content = next((item[key] for key in _TEXT_KEYS if key in item), None)
    text = text_of(content)
    if not isinstance(role, str) or text is None:
        return None
    return Message(role.strip().lower(), text, instant_of(item.get("timestamp")))


def text_of(content: object) -> str | None:
    """Text, lists of text parts, and either of them wrapped in a JSON string; else ``None``."""
    if content is None:
        return ""
    if isinstance(content, str):
        inner = _from_json_string(content)
        unwrapped = text_of(inner) if _is_wrapper(inner) else None
        return _encodable(content) if unwrapped is None else unwrapped
    if isinstance(content, dict):
        return text_of(next((content[key] for key in _TEXT_KEYS if key in content), None))
    if isinstance(content, list):
        return _joined(content)
    return None


def _joined(parts: Iterable[Any]) -> str:
    """Parts that are no text (images, audio) have no tokens of ours and are skipped."""
    return "\n".join(text for part in parts if (text := text_of(part)))


def _from_json_string(value: object) -> object:
    """What a string of JSON holds. One that nests too deeply is somebody's text."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        inner = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return value if is_deep(inner) else inner


def _is_wrapper(value: object) -> bool:
    """JSON made by an exporter, not JSON that a person pasted as the message."""
    if isinstance(value, dict):
        return bool(value) and value.keys() <= _WRAPPER_KEYS and any(k in value for k in _TEXT_KEYS)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and "type" in part and _is_wrapper(part) for part in value)
    )


def _encodable(text: str) -> str:
    """Half surrogate pairs, which no UTF-8 file or tokenizer takes, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _id_of(entry: dict[str, Any], index: int) -> str:
    found = next((entry[key] for key in _IDS if entry.get(key) not in (None, "")), None)
    return f"row-{index}" if found is None else _encodable(str(found))


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def instant_of(value: object) -> float | None:
    """Unix seconds from a datetime, an ISO text or a number; ``None`` for anything else."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else None
