"""Books of what was read, kept and left out. Every sum adds up, or reading is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Ledger:
    """``read == kept + Σ dropped``, by reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def kept(self) -> int:
        return self.read - sum(self.dropped.values())

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[reason] += count

    def to_json(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "dropped": dict(sorted(self.dropped.items()))}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Ledger:
        return cls(document["read"], Counter(document["dropped"]))


@dataclass(slots=True)
class Account:
    """Three ledgers: conversations, their messages, and the turns made of those.

    ``truncated_at_byte`` is where a cut-off file ends, ``None`` for a whole one.
    """

    conversations: Ledger = field(default_factory=Ledger)
    messages: Ledger = field(default_factory=Ledger)
    turns: Ledger = field(default_factory=Ledger)
    truncated_at_byte: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "conversations": self.conversations.to_json(),
            "messages": self.messages.to_json(),
            "turns": self.turns.to_json(),
            "truncated_at_byte": self.truncated_at_byte,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Account:
        return cls(
            Ledger.from_json(document["conversations"]),
            Ledger.from_json(document["messages"]),
            Ledger.from_json(document["turns"]),
            document["truncated_at_byte"],
        )
