"""What a history tells of its past, and the notes that turns leave in it. Pure, no clock."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from ppdbench.router.memory import (
    ANSWERED,
    MOST_ANSWER_TOKENS,
    REASONED_STEPS,
    SEVERAL,
    SPLIT,
    Memory,
    Note,
)

MAX_LOOKUPS = 32
"""Histories are looked up from their end; what lies deeper than this is cold."""


class Place(Enum):
    """Where a request stands to the note it led to.

    One that DIFFERS comes from a conversation that the client named, whose history was changed:
    nobody knows how much of it the home still holds.
    """

    CONTINUES = "continues"
    REPEATS = "repeats"
    DIFFERS = "differs"


class Found(Struct, frozen=True):
    """A note and how the request stands to it."""

    note: Note
    place: Place


class History(Protocol):
    """What a request says about its past.

    ``size`` is its whole length, in tokens where ``in_tokens``, else in characters. ``turn``
    counts the answers in it plus one; ``None`` where only a note can tell.
    """

    @property
    def size(self) -> int: ...
    @property
    def in_tokens(self) -> bool: ...
    @property
    def turn(self) -> int | None: ...

    def find(self, memory: Memory) -> Found | None:
        """The deepest place that somebody left a note at."""
        ...

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        """Leave ``note`` behind this request and, where it is known, behind its ``answer``.

        ``note`` tells of the request alone.
        """
        ...

    def texts_behind(self, note: Note) -> list[str]:
        """What stands behind the place of ``note``, one text per message; empty for token ids."""
        ...


class Answer(Struct, frozen=True):
    """What was answered, as far as the history of the next turn will show it.

    ``reasoned``: there was reasoning before the text, which ``tokens`` count and the next turn's
    prompt leaves out.
    """

    text: str
    tools: str = ""
    tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    reasoned: bool = False


def note_behind(note: Note, size: int, answer: Answer | None, check: int = 0) -> Note:
    """``note`` behind the answer, if there is one.

    Behind reasoning no more is held than the question: what follows it stands elsewhere then.
    """
    if answer is not None and answer.reasoned:
        steps = REASONED_STEPS if answer.tools else 0
        return replace(note, check=check, flags=note.flags | steps)
    tokens = 0 if answer is None else answer.tokens or 0
    return Note(
        note.conversation,
        note.context_tokens + tokens,
        size,
        note.used_s,
        note.home,
        note.turn,
        note.epoch,
        note.flags if answer is None else note.flags | ANSWERED,
        min(tokens, MOST_ANSWER_TOKENS),
        check,
    )


def leave_note(memory: Memory, key: bytes, note: Note, *, behind_answer: bool = False) -> None:
    """Put ``note`` and say where another conversation has been at this very place.

    Behind the same answer either home holds all of it; behind the same question alone, nobody can
    tell which answer is the one that the next turn will show.
    """
    other = memory.get(key)
    if other is not None and other.conversation != note.conversation:
        flags = SEVERAL
        if not behind_answer and (other.home != note.home or other.flags & SPLIT):
            flags |= SPLIT
        note = replace(note, flags=note.flags | flags)
    memory.put(key, note)
