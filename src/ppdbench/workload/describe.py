"""What a workload looks like: counts and quantiles over the conversations that are kept."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppdbench.workload.account import Account
from ppdbench.workload.chat import Chat

QUANTILES = (50, 90, 95, 99)
_SHOWN_NAMES = 10


@dataclass(slots=True)
class Shape:
    """Lengths of all turns seen, as machine integers: a million conversations take some 50 MB.

    ``new_tokens``, ``output_tokens`` and ``context_tokens`` have an entry per turn, context being
    what stands before the turn's own request.
    """

    turns: array[int] = field(default_factory=lambda: array("i"))
    new_tokens: array[int] = field(default_factory=lambda: array("i"))
    output_tokens: array[int] = field(default_factory=lambda: array("i"))
    context_tokens: array[int] = field(default_factory=lambda: array("i"))
    think_s: array[float] = field(default_factory=lambda: array("d"))
    languages: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)

    def add(self, chat: Chat) -> None:
        self.turns.append(chat.turns)
        self.new_tokens.extend(chat.new_tokens)
        self.output_tokens.extend(chat.output_tokens)
        self.context_tokens.extend(_contexts(chat))
        self.think_s.extend(pause for pause in chat.think_s[1:] if pause is not None)
        if chat.language:
            self.languages[chat.language] += 1
        if chat.model:
            self.models[chat.model] += 1

    def to_json(self, *, with_tokens: bool) -> dict[str, Any]:
        """Statistics are ``None`` for what the source or the caller did not give."""
        tokens = ("new_tokens", "output_tokens", "context_tokens")
        return {
            "turns_per_conversation": statistics_of(self.turns),
            **{
                name: statistics_of(getattr(self, name)) if with_tokens else None for name in tokens
            },
            "recorded_think_s": statistics_of(self.think_s),
            "languages": dict(self.languages.most_common(_SHOWN_NAMES)),
            "models": dict(self.models.most_common(_SHOWN_NAMES)),
        }


def _contexts(chat: Chat) -> Iterator[int]:
    held = chat.context_tokens
    for new, output in zip(chat.new_tokens, chat.output_tokens, strict=True):
        yield held
        held += new + output


def statistics_of(values: array[int] | array[float]) -> dict[str, float] | None:
    """Count, mean, extremes and quantiles; ``None`` without a value."""
    if not values:
        return None
    numbers = np.asarray(values)
    quantiles = np.percentile(numbers, QUANTILES)
    return {
        "n": len(values),
        "mean": float(numbers.mean()),
        "min": float(numbers.min()),
        **{f"p{q}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
        "max": float(numbers.max()),
    }


def shape_of(chats: Iterable[Chat]) -> Shape:
    shape = Shape()
    for chat in chats:
        shape.add(chat)
    return shape


def account_document(account: Account) -> dict[str, Any]:
    """``input = kept + Σ dropped``; messages and turns have ledgers of their own."""
    books = account.conversations
    return {
        "input": books.read,
        "conversations": books.read,
        "kept": books.kept,
        "dropped": dict(sorted(books.dropped.items())),
        "messages": account.messages.to_json(),
        "turns": account.turns.to_json(),
        "truncated_at_byte": account.truncated_at_byte,
    }
