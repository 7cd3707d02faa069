"""What a user says, turn by turn, before anybody answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One user request. Counts are by the workload's tokenizer; the server's counts rule later.

    ``text`` or ``token_ids`` carry the content for a real engine; a simulation needs neither.
    ``reply_text`` or ``reply_token_ids`` is the recorded answer, if there is one. ``think_s`` is
    the pause between the end of the previous turn and this one (0 for Turn 1).
    """

    new_tokens: int
    output_tokens: int
    think_s: float = 0.0
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    reply_text: str | None = None
    reply_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.new_tokens < 1 or self.output_tokens < 1 or self.think_s < 0:
            raise ValueError(f"a turn needs tokens in and out and no negative pause: {self!r}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation's plan. Turn k+1 always extends turn k.

    ``context_tokens`` stand before Turn 1 (a system prompt, a leading assistant message). The
    first ``shared_tokens`` of them are the same for every conversation with the same
    ``shared_id``, so a prefix cache may serve them.
    """

    id: str
    turns: tuple[Turn, ...]
    context_tokens: int = 0
    shared_tokens: int = 0
    shared_id: str = ""
    context_text: str | None = None
    context_role: str = "system"
    context_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"conversation {self.id!r} has no turn")
        if not 0 <= self.shared_tokens <= self.context_tokens:
            raise ValueError(f"conversation {self.id!r}: shared tokens exceed its context")

    def context_before(self, turn: int) -> int:
        """Tokens of history before 1-based ``turn``'s new tokens, replies as planned."""
        before = self.turns[: turn - 1]
        return self.context_tokens + sum(t.new_tokens + t.output_tokens for t in before)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A conversation and when it begins, in seconds from the start of the point."""

    at_s: float
    conversation: Conversation
