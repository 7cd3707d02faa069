"""A toy tokenizer whose text and ids are each other's image: token 7 is the word ``t7``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VOCABULARY = 4096
_ROLE_END = 3
_ROLE_IDS = {"system": 4, "user": 5, "assistant": 6, "tool": 7}
_FIRST_WORD = 16
_LONGEST_NUMBER = 20


def encode(text: str) -> list[int]:
    """Words to ids: ``t<n>`` is n, any other word is a stable hash."""
    return [_word_id(word) for word in text.split()]


def _word_id(word: str) -> int:
    if word.startswith("t") and word[1:].isdecimal() and len(word) <= _LONGEST_NUMBER:
        return int(word[1:]) % VOCABULARY
    return _FIRST_WORD + zlib.crc32(word.encode()) % (VOCABULARY - _FIRST_WORD)


def decode(ids: Iterable[int]) -> str:
    """Ids to text; every token starts with a space, so pieces can be joined."""
    return "".join(f" t{i}" for i in ids)


def encode_chat(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A chat as ids. A longer chat starts with the ids of a shorter one and its reply."""
    ids: list[int] = []
    for message in messages:
        ids.append(_ROLE_IDS.get(str(message.get("role")), 8))
        ids += encode(_content_text(message.get("content")))
        ids.append(_ROLE_END)
    return [*ids, _ROLE_IDS["assistant"]]


def _content_text(content: object) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def reply_ids(prompt: Sequence[int], count: int) -> list[int]:
    """The reply that every node gives to ``prompt``: known, and different for other prompts."""
    start = zlib.crc32(b" ".join(b"%d" % i for i in prompt))
    span = VOCABULARY - _FIRST_WORD
    return [_FIRST_WORD + (start + 7 * i) % span for i in range(count)]
