"""Who is speaking: a request's history as a chain of prefix hashes. Pure, no clock.

Each place in a history where an answer ended has a key, the hash of all that stands before it, and
the turn that ended there left a note under it (:mod:`ppdbench.router.memory`). So the deepest key
with a note says which conversation this is, how much of it a node already holds and which turn it
is. Branches and edits share keys up to where they part; two users with the same first words part
at the first answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import xxhash

from ppdbench.router.chats import KeyedChat, NamedChat, read_chat
from ppdbench.router.history import History
from ppdbench.router.messages import canonical, part_of
from ppdbench.router.prompts import NamedRaw, RawHistory

_SEPARATING = frozenset({
    "model", "user", "cache_salt", "tools", "prompt_cache_key", "reasoning_effort",
    "chat_template", "chat_template_kwargs", "documents",
})  # fmt: skip
"""Fields with another value give another prompt from its beginning on, or another cache."""


def explicit_key(session_id: bytes | None, body: Mapping[str, Any]) -> bytes | None:
    """The key of a conversation that the client named by ``x-session-id``.

    For ``prompt_cache_key``, which many clients send alike for all their users, see
    :class:`~ppdbench.router.chats.KeyedChat`.
    """
    if not session_id:
        return None
    return xxhash.xxh3_128_digest(_opening(body, b"explicit") + part_of(b"name", session_id))


def read_history(body: Mapping[str, Any], name: bytes | None = None) -> History | None:
    """The history in a parsed body; ``None`` when there is nothing one could be read from.

    ``name`` is the key of a conversation that the client named; its notes lie there.
    """
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        if name is not None:
            return NamedChat(name, messages)
        chat = read_chat(_start(body, b"chat"), messages)
        return KeyedChat(_start(body, b"keyed").digest(), chat) if _cache_key(body) else chat
    raw = _read_raw(body)
    return raw if raw is None or name is None else NamedRaw(name, raw)


def _cache_key(body: Mapping[str, Any]) -> bool:
    return isinstance(body.get("prompt_cache_key"), str) and bool(body["prompt_cache_key"])


def _read_raw(body: Mapping[str, Any]) -> RawHistory | None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return RawHistory(_start(body, b"text"), prompt.encode("utf-8", "replace"), 1)
    if isinstance(prompt, list) and prompt:
        return _read_tokens(body, prompt)
    return None


def _read_tokens(body: Mapping[str, Any], tokens: list[Any]) -> RawHistory | None:
    try:
        raw = array("q", tokens).tobytes()
    except (TypeError, OverflowError):
        return None
    return RawHistory(_start(body, b"tokens"), raw, 8)


def _start(body: Mapping[str, Any], kind: bytes) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(_opening(body, kind))


def _opening(body: Mapping[str, Any], kind: bytes) -> bytes:
    """What separates histories before their first word; a null is as good as nothing."""
    opening = kind
    for name in sorted(_SEPARATING.intersection(body)):
        if body[name] is not None:
            opening += part_of(name.encode(), canonical(body[name]))
    return opening
