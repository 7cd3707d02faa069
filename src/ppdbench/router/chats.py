"""Histories of chats: found by themselves, by a ``prompt_cache_key``, or by the client's name."""

from __future__ import annotations

from typing import Any

import xxhash
from msgspec.structs import replace

from ppdbench.router.history import MAX_LOOKUPS, Answer, Found, Place, leave_note, note_behind
from ppdbench.router.memory import ANSWERED, REASONED_STEPS, SEVERAL, Memory, Note
from ppdbench.router.messages import (
    CHECK_BITS,
    answer_bytes,
    answers_before_last_asked,
    check_of,
    content_and_length,
    drops_reasoning,
    is_answer,
    length_in,
    length_of,
    part_of,
    role_and_content,
    shown_answer,
    texts_behind,
)

TRIMMED_LENGTH = 16
"""White space that clients may take off an answer's ends."""


def read_chat(hasher: xxhash.xxh3_128, messages: list[Any]) -> ChatHistory:
    """``hasher`` has read what separates histories before their first word, and reads on."""
    marks: list[bytes] = []
    size = 0
    for message in messages:
        role, raw = role_and_content(message)
        if role == b"assistant":
            marks.append(hasher.digest())
            _add(hasher, role, raw)
            marks.append(hasher.digest())
        else:
            _add(hasher, role, raw)
        size += length_in(message, raw)
    return ChatHistory(hasher, marks, messages, size)


class ChatHistory:
    """Messages. ``marks`` are the keys before and behind each answer, the shallow ones first."""

    in_tokens = False

    def __init__(
        self, hasher: xxhash.xxh3_128, marks: list[bytes], messages: list[Any], size: int
    ) -> None:
        self._hasher = hasher
        self._marks = marks
        self._messages = messages
        self._prompt_key = hasher.digest()
        self.turn = len(marks) // 2 + 1
        self.size = size

    def find(self, memory: Memory) -> Found | None:
        """Deepest first. A first turn has no past, even where another began with its words."""
        if self.turn == 1:
            return None
        note = memory.get(self._prompt_key)
        if note is not None:
            return Found(note, Place.REPEATS)
        for key in self._marks[: -MAX_LOOKUPS - 1 : -1]:
            note = memory.get(key)
            if note is not None:
                return Found(self._less_its_steps(memory, note), Place.CONTINUES)
        return None

    def _less_its_steps(self, memory: Memory, note: Note) -> Note:
        """Up to the question that the steps answered, where their reasoning is taken out now."""
        if not note.flags & REASONED_STEPS or not drops_reasoning(self._messages):
            return note
        asked = memory.get(self._marks[2 * answers_before_last_asked(self._messages)])
        return note if asked is None or asked.flags & REASONED_STEPS else _up_to(asked, note)

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        leave_note(memory, self._prompt_key, note)
        if answer is None:
            return
        hasher = self._hasher.copy()
        raw = answer_bytes(answer.text, answer.tools)
        _add(hasher, b"assistant", raw)
        behind = note_behind(note, self.size + len(raw), answer)
        leave_note(memory, hasher.digest(), behind, behind_answer=True)

    def texts_behind(self, note: Note) -> list[str]:
        return texts_behind(self._messages, note)

    def last_answer_check(self) -> int | None:
        """Of the last answer that the history shows, if it shows any."""
        shown = next(filter(is_answer, reversed(self._messages)), None)
        return None if shown is None else check_of(shown_answer(shown))


class KeyedChat:
    """Messages under a ``prompt_cache_key``: their history says whose they are, else the key does.

    So a conversation whose history was cut or rewritten is still known, by the key and the last
    answer. Not by a key that a second conversation has used: it is an application's, and names
    nobody. Nor by one that is first seen in mid-conversation, as after a restart: there all who use
    it have histories that are not known, and the first to come would stand for the others.
    """

    in_tokens = False

    def __init__(self, key: bytes, chat: ChatHistory) -> None:
        self._key = key
        self._chat = chat
        self.turn, self.size = chat.turn, chat.size

    def find(self, memory: Memory) -> Found | None:
        found = self._chat.find(memory)
        if found is not None or self.turn == 1:
            return found
        note = memory.get(self._key)
        if note is None or note.flags & SEVERAL or note.check != self._chat.last_answer_check():
            return None
        return Found(note, Place.DIFFERS)

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        self._chat.leave(memory, note, answer)
        if not self._is_alone(memory.get(self._key), note.conversation):
            note = replace(note, flags=note.flags | SEVERAL)
        check = 0 if answer is None else check_of(answer_bytes(answer.text, answer.tools))
        memory.put(self._key, replace(note, check=check))

    def _is_alone(self, last: Note | None, conversation: int) -> bool:
        if last is None:
            return self.turn == 1
        return not last.flags & SEVERAL and last.conversation == conversation

    def texts_behind(self, note: Note) -> list[str]:
        return self._chat.texts_behind(note)


class NamedChat:
    """Messages of a conversation that the client named: one note, under that name.

    Its check is of all that stands before the last answer, as the client showed it when it asked.
    So the last answer may come back changed, and any other change of the history is noticed.
    """

    in_tokens = False

    def __init__(self, name: bytes, messages: list[Any]) -> None:
        self._name = name
        self._messages = messages
        self._check_before = 0
        self._size_before = self._size_behind = 0
        turn, size = 1, 0
        hasher = xxhash.xxh3_64()
        for message in messages:
            if is_answer(message):
                self._check_before = hasher.intdigest() & CHECK_BITS
                hasher.update(part_of(b"assistant", shown_answer(message)))
                turn += 1
                self._size_before = size
                size += length_of(message.get("content"))
                self._size_behind = size
            else:
                raw, length = content_and_length(message)
                hasher.update(part_of(b"", raw))
                size += length
        self._check = hasher.intdigest() & CHECK_BITS
        self.turn, self.size = turn, size

    def find(self, memory: Memory) -> Found | None:
        note = memory.get(self._name)
        if note is None:
            return None
        if note.check == self._check_before and self.turn > 1:
            return Found(self._as_far_as_shown(note), Place.CONTINUES)
        if note.check == self._check:
            return Found(_behind_question(note, self.size), Place.REPEATS)
        # A first turn has no past: some clients send one name for all their users.
        return None if self.turn == 1 else Found(note, Place.DIFFERS)

    def _as_far_as_shown(self, note: Note) -> Note:
        """Behind the question where the client shows an answer of another length.

        A little less is one that was trimmed.
        """
        if abs(note.size - self._size_behind) <= TRIMMED_LENGTH:
            return note
        return _behind_question(note, self._size_before)

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        memory.put(self._name, note_behind(note, self.size + _size(answer), answer, self._check))

    def texts_behind(self, note: Note) -> list[str]:
        return texts_behind(self._messages, note)


def _behind_question(note: Note, size: int) -> Note:
    """``note`` less its answer; the question ended at ``size``."""
    if not note.flags & ANSWERED:
        return note
    return replace(
        note,
        context_tokens=note.context_tokens - note.answer_tokens,
        answer_tokens=0,
        size=size,
        flags=note.flags & ~ANSWERED,
    )


def _up_to(note: Note, last: Note) -> Note:
    """What is held of the conversation that ``last`` left where it stays the same to ``note``."""
    return replace(
        last,
        context_tokens=note.context_tokens,
        size=note.size,
        turn=note.turn,
        flags=last.flags & ~(ANSWERED | REASONED_STEPS) | note.flags & ANSWERED,
        answer_tokens=note.answer_tokens,
    )


def _add(hasher: xxhash.xxh3_128, kind: bytes, raw: bytes) -> None:
    hasher.update(part_of(kind, raw))


def _size(answer: Answer | None) -> int:
    return 0 if answer is None else length_of(answer.text)
