"""A recorded conversation before and after cleaning."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Message:
    """One message as it was read; ``role`` is as written there, ``at_s`` a Unix time if known."""

    role: str
    text: str
    at_s: float | None = None


@dataclass(slots=True)
class RawChat:
    """A conversation as it was read. ``problem`` says why it has no readable messages."""

    id: str
    messages: list[Message] = field(default_factory=list)
    language: str | None = None
    model: str | None = None
    toxic: bool = False
    redacted: bool = False
    problem: str = ""


@dataclass(slots=True)
class Chat:
    """A cleaned conversation; the lists run in parallel, one entry per turn.

    Token counts are 0 until counted. ``think_s`` is the recorded pause before each turn, ``None``
    where the source does not tell. ``texts`` and ``replies`` are empty when only counts were
    asked for.
    """

    id: str
    texts: list[str]
    replies: list[str]
    new_tokens: list[int]
    output_tokens: list[int]
    think_s: list[float | None]
    context_text: str = ""
    context_role: str = "system"
    context_tokens: int = 0
    language: str | None = None
    model: str | None = None
    toxic: bool = False
    redacted: bool = False

    @property
    def turns(self) -> int:
        return len(self.new_tokens)

    def keep_turns(self, count: int) -> None:
        """Cut to the first ``count`` turns; a beginning of a conversation is a conversation."""
        for column in (
            self.texts, self.replies, self.new_tokens, self.output_tokens, self.think_s,
        ):  # fmt: skip
            del column[count:]
