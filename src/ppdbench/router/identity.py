"""Who is speaking: a request's history as a chain of prefix hashes. Pure, no clock.

Each place in a history where an answer ended has a key, the hash of all that stands before it, and
the turn that ended there left a note under it (:mod:`ppdbench.router.memory`). So the deepest key
with a note says which conversation this is, how much of it a node already holds and which turn it
is. Branches and edits share keys up to where they part; two users with the same first words part
at the first answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, Protocol

import orjson
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from ppdbench.router.documents import written
from ppdbench.router.memory import (
    ANSWERED,
    MOST_ANSWER_TOKENS,
    MOST_SIZES,
    REASONED_STEPS,
    SEVERAL,
    SPLIT,
    Memory,
    Note,
)

MAX_LOOKUPS = 32
"""Histories are looked up from their end; what lies deeper than this is cold."""

_SEPARATING = frozenset({
    "model", "user", "cache_salt", "tools", "prompt_cache_key", "reasoning_effort",
    "chat_template", "chat_template_kwargs", "documents",
})  # fmt: skip
"""Fields with another value give another prompt from its beginning on, or another cache."""

_CHECK_BITS = 0xFFFFFFFF

TRIMMED_LENGTH = 16
"""White space that clients may take off an answer's ends."""

MEDIA_LENGTH = 2048
"""What an image or another part that is no text counts for, in characters: some 500 tokens."""

_BORDER_UNITS = 16
_BORDER_GROWTH = 4
"""Borders of raw prompts stand 16 units apart, later 1/16 of what stands before them."""

_STEPS = 16
"""Between two borders are steps of 16 units, sixteen of which make a longer one, and so on."""


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


def explicit_key(session_id: bytes | None, body: Mapping[str, Any]) -> bytes | None:
    """The key of a conversation that the client named by ``x-session-id``.

    For ``prompt_cache_key``, which many clients send alike for all their users, see
    :class:`KeyedChat`.
    """
    if not session_id:
        return None
    return xxhash.xxh3_128_digest(_opening(body, b"explicit") + _part(b"name", session_id))


def read_history(body: Mapping[str, Any], name: bytes | None = None) -> History | None:
    """The history in a parsed body; ``None`` when there is nothing one could be read from.

    ``name`` is the key of a conversation that the client named; its notes lie there.
    """
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        if name is not None:
            return NamedChat(name, messages)
        chat = _read_chat(body, messages)
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


def _start(body: Mapping[str, Any], kind: bytes) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(_opening(body, kind))


def _opening(body: Mapping[str, Any], kind: bytes) -> bytes:
    """What separates histories before their first word; a null is as good as nothing."""
    opening = kind
    for name in sorted(_SEPARATING.intersection(body)):
        if body[name] is not None:
            opening += _part(name.encode(), _canonical(body[name]))
    return opening


def _add(hasher: xxhash.xxh3_128, kind: bytes, raw: bytes) -> None:
    hasher.update(_part(kind, raw))


def _part(kind: bytes, raw: bytes) -> bytes:
    """Length first, so that parts cannot run into each other."""
    return b"%b\x1f%d\x1f%b" % (kind, len(raw), raw)


def _canonical(value: object) -> bytes:
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


def _length(content: object) -> int:
    """Bytes of a text; of an image and its like they would tell nothing of its tokens."""
    if isinstance(content, str):
        return len(content) if content.isascii() else len(_canonical(content))
    if isinstance(content, list):
        return sum(_length(p["text"]) if _is_text_part(p) else MEDIA_LENGTH for p in content)
    return len(_canonical(content))


def _length_in(message: object, raw: bytes) -> int:
    """Of a message whose content is ``raw``."""
    content = message.get("content") if isinstance(message, dict) else None
    return _length(content) if isinstance(content, list) else len(raw)


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
        if not note.flags & REASONED_STEPS or not _drops_reasoning(self._messages):
            return note
        asked = memory.get(self._marks[2 * _answers_before_last_asked(self._messages)])
        return note if asked is None or asked.flags & REASONED_STEPS else _up_to(asked, note)

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        _put(memory, self._prompt_key, note)
        if answer is None:
            return
        hasher = self._hasher.copy()
        raw = _answer_bytes(answer.text, answer.tools)
        _add(hasher, b"assistant", raw)
        behind = _behind(note, self.size + len(raw), answer)
        _put(memory, hasher.digest(), behind, behind_answer=True)

    def texts_behind(self, note: Note) -> list[str]:
        return _texts_behind(self._messages, note)

    def last_answer_check(self) -> int | None:
        """Of the last answer that the history shows, if it shows any."""
        shown = next(filter(_is_answer, reversed(self._messages)), None)
        return None if shown is None else _check_of(_shown_answer(shown))


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
        check = 0 if answer is None else _check_of(_answer_bytes(answer.text, answer.tools))
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
            if _is_answer(message):
                self._check_before = hasher.intdigest() & _CHECK_BITS
                hasher.update(_part(b"assistant", _shown_answer(message)))
                turn += 1
                self._size_before = size
                size += _length(message.get("content"))
                self._size_behind = size
            else:
                raw, length = _content_and_length(message)
                hasher.update(_part(b"", raw))
                size += length
        self._check = hasher.intdigest() & _CHECK_BITS
        self.turn, self.size = turn, size

    def find(self, memory: Memory) -> Found | None:
        note = memory.get(self._name)
        if note is None:
            return None
        if note.check == self._check_before and self.turn > 1:
            return Found(self._as_far_as_shown(note), Place.CONTINUES)
        if note.check == self._check:
            return Found(note, Place.REPEATS)
        # A first turn has no past: some clients send one name for all their users.
        return None if self.turn == 1 else Found(note, Place.DIFFERS)

    def _as_far_as_shown(self, note: Note) -> Note:
        """Behind the question where the client shows an answer of another length.

        A little less is one that was trimmed.
        """
        if not note.flags & ANSWERED or abs(note.size - self._size_behind) <= TRIMMED_LENGTH:
            return note
        return replace(
            note,
            context_tokens=note.context_tokens - note.answer_tokens,
            answer_tokens=0,
            size=self._size_before,
            flags=note.flags & ~ANSWERED,
        )

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        memory.put(self._name, _behind(note, self.size + _size(answer), answer, self._check))

    def texts_behind(self, note: Note) -> list[str]:
        return _texts_behind(self._messages, note)


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


def _drops_reasoning(messages: list[Any]) -> bool:
    """Whether a template takes out reasoning that it kept as long as the model called tools."""
    return not _is_behind_a_tool(messages) and any(
        message.get("reasoning_content") or message.get("reasoning")
        for message in filter(_is_answer, messages)
    )


def _answers_before_last_asked(messages: list[Any]) -> int:
    """How many answers stand before the last question that the history shows an answer to."""
    answers = asked = before = 0
    for message in messages:
        if _is_answer(message):
            before = asked
            answers += 1
        elif isinstance(message, dict) and message.get("role") == "user":
            asked = answers
    return before


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


def _texts_behind(messages: list[Any], note: Note) -> list[str]:
    """A note of turn n stands behind the nth answer, or before it where it was never seen."""
    answers = [at for at, message in enumerate(messages) if _is_answer(message)]
    if note.turn > len(answers):
        return []
    begin = answers[note.turn - 1] + bool(note.flags & ANSWERED)
    return [_text(message) for message in messages[begin:]]


def _text(message: object) -> str:
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if _is_text_part(part))
    return _canonical(content).decode("utf-8", "replace")


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _size(answer: Answer | None) -> int:
    return 0 if answer is None else _length(answer.text)


def _behind(note: Note, size: int, answer: Answer | None, check: int = 0) -> Note:
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


def _put(memory: Memory, key: bytes, note: Note, *, behind_answer: bool = False) -> None:
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


def _check_of(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw) & _CHECK_BITS


def _answer_bytes(content: str, tools: str) -> bytes:
    """Clients trim answers when they send them back, so white space at the ends does not count."""
    return f"{content.strip()}\x1e{tools}".encode("utf-8", "replace")


def _tool_ids(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return ""
    return ",".join(str(call.get("id")) for call in calls if isinstance(call, dict))


def _read_chat(body: Mapping[str, Any], messages: list[Any]) -> ChatHistory:
    hasher = _start(body, b"chat")
    marks: list[bytes] = []
    size = 0
    for message in messages:
        role, raw = _role_and_content(message)
        if role == b"assistant":
            marks.append(hasher.digest())
            _add(hasher, role, raw)
            marks.append(hasher.digest())
        else:
            _add(hasher, role, raw)
        size += _length_in(message, raw)
    return ChatHistory(hasher, marks, messages, size)


def _content_and_length(message: object) -> tuple[bytes, int]:
    """As in :func:`_role_and_content`, with no more than a look at a plain question."""
    if isinstance(message, dict) and message.get("role") == "user":
        content = message.get("content")
        if isinstance(content, str):
            raw = content.encode("utf-8", "replace")
            return raw, len(raw)
    raw = _role_and_content(message)[1]
    return raw, _length_in(message, raw)


def _role_and_content(message: object) -> tuple[bytes, bytes]:
    """Of anything that stands in ``messages``; what is no message is the engine's to refuse."""
    if not isinstance(message, dict):
        return b"", _canonical(message)
    role = message.get("role")
    if role == "assistant":
        return b"assistant", _shown_answer(message)
    return _canonical(role), _canonical(message.get("content"))


def _shown_answer(message: Mapping[str, Any]) -> bytes:
    """An answer as a history shows it."""
    content = message.get("content")
    text = content if isinstance(content, str) else _canonical(content).decode("utf-8", "replace")
    return _answer_bytes(text, _tool_ids(message))


class RawHistory:
    """A text or token prompt of ``unit`` bytes per unit: no message ends show in it.

    A note lies under the hash of its whole history; a directory under the last border before its
    end says how long the histories are that passed there. It knows few: where many begin with the
    same words, as an application's do, those under the last step of each size before each end tell
    them apart. One more, under the first border, says whether anybody began like this.
    """

    turn = None

    def __init__(self, hasher: xxhash.xxh3_128, raw: bytes, unit: int) -> None:
        self._start = hasher
        self.raw = raw
        self.unit = unit
        self.in_tokens = unit > 1
        self.size = len(raw) // unit

    def find(self, memory: Memory) -> Found | None:
        """A history no longer than ours that is its beginning, the longest first.

        A first turn has no past, even where another began with its words.
        """
        borders = _borders(self.size)
        if not borders or not memory.sizes(self.key(self.raw, borders[0], b"opening")):
            return None
        ends = [*borders[1:], self.size + 1]
        for border, end in list(zip(borders, ends, strict=True))[: -MAX_LOOKUPS - 1 : -1]:
            for size in sorted(self._sizes_behind(memory, border, end), reverse=True):
                key = self.key(self.raw, size, b"end")
                note = memory.get(key) if size <= self.size else None
                if note is None:
                    continue
                if size < self.size:
                    return Found(note, Place.CONTINUES)
                if note.turn > 1 or note.flags & ANSWERED:
                    return Found(note, Place.REPEATS)
        return None

    def _sizes_behind(self, memory: Memory, border: int, end: int) -> Collection[int]:
        """Of histories that passed ``border`` and ended before ``end``."""
        sizes = memory.sizes(self.key(self.raw, border, b"border"))
        if len(sizes) < MOST_SIZES:
            return sizes
        part = range(border, end)
        return {*sizes, *_sizes_on(memory, self._walk(self.raw), part, _steps(border))}

    def _walk(self, raw: bytes) -> _Walk:
        return _Walk(self._start.copy(), memoryview(raw), self.unit)

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        self._leave(memory, self.raw, note, behind_answer=False)
        raw = self.with_answer(answer)
        if answer is not None and len(raw) > len(self.raw):
            behind = _behind(note, len(raw) // self.unit, answer)
            self._leave(memory, raw, behind, behind_answer=True)

    def _leave(self, memory: Memory, raw: bytes, note: Note, *, behind_answer: bool) -> None:
        _put(memory, self.key(raw, note.size, b"end"), note, behind_answer=behind_answer)
        borders = _borders(note.size)
        if not borders:
            return
        for border, kind in ((borders[0], b"opening"), (borders[-1], b"border")):
            memory.add_size(self.key(raw, border, kind), note.size, note.used_s)
        walk = self._walk(raw)
        for step in _steps(borders[-1]):
            walk.to(note.size - (note.size - borders[-1]) % step)
            memory.add_size(walk.key(step), note.size, note.used_s)

    def texts_behind(self, note: Note) -> list[str]:
        if self.in_tokens:
            return []
        return [self.raw[note.size :].decode("utf-8", "replace")]

    def with_answer(self, answer: Answer | None) -> bytes:
        """The history with its answer, as far as it is known in the prompt's own units."""
        if answer is None:
            return self.raw
        if self.in_tokens:
            return self.raw + array("q", answer.token_ids).tobytes()
        return self.raw + answer.text.encode("utf-8", "replace")

    def key(self, raw: bytes, size: int, kind: bytes) -> bytes:
        """Hash of the first ``size`` units of ``raw``, in the role ``kind``."""
        hasher = self._start.copy()
        hasher.update(kind)
        hasher.update(memoryview(raw)[: size * self.unit])
        return hasher.digest()


class _Walk:
    """The keys of steps along a raw prompt, each part of which is hashed once."""

    def __init__(self, hasher: xxhash.xxh3_128, raw: memoryview, unit: int, at: int = 0) -> None:
        self._hasher = hasher
        self._raw = raw
        self._unit = unit
        self._at = at

    def to(self, at: int) -> None:
        self._hasher.update(self._raw[self._at * self._unit : at * self._unit])
        self._at = at

    def key(self, step: int) -> bytes:
        """Of the step of this length that begins here."""
        hasher = self._hasher.copy()
        hasher.update(b"step%d" % step)
        return hasher.digest()

    def copy(self) -> _Walk:
        return _Walk(self._hasher.copy(), self._raw, self._unit, self._at)


def _sizes_on(memory: Memory, walk: _Walk, part: range, steps: list[int]) -> set[int]:
    """Of histories that ended in ``part``; where a step knows of many, its own steps are asked."""
    found: set[int] = set()
    for at in part[:: steps[0]] if steps else ():
        walk.to(at)
        sizes = memory.sizes(walk.key(steps[0]))
        found.update(sizes)
        if len(sizes) == MOST_SIZES:
            inside = range(at, min(at + steps[0], part.stop))
            found |= _sizes_on(memory, walk.copy(), inside, steps[1:])
    return found


class NamedRaw:
    """A raw prompt of a conversation that the client named: two notes, checked over all of it.

    One stands behind the last answer; the other behind its question, for a client that asks anew or
    has changed the answer.
    """

    turn = None

    def __init__(self, name: bytes, history: RawHistory) -> None:
        self._name = name
        self._history = history
        self.in_tokens = history.in_tokens
        self.size = history.size

    def find(self, memory: Memory) -> Found | None:
        last = memory.get(self._name)
        if last is None:
            return None
        if self._begins_with(last):
            return Found(last, Place.REPEATS if self.size == last.size else Place.CONTINUES)
        asked = memory.get(self._question_name())
        if asked is None or not self._begins_with(asked):
            return Found(last, Place.DIFFERS)
        return Found(asked, Place.REPEATS if self.size == asked.size else Place.CONTINUES)

    def _begins_with(self, note: Note) -> bool:
        return self.size >= note.size and self._check(self._history.raw, note.size) == note.check

    def _question_name(self) -> bytes:
        return xxhash.xxh3_128_digest(b"question" + self._name)

    def leave(self, memory: Memory, note: Note, answer: Answer | None) -> None:
        raw = self._history.with_answer(answer)
        size = len(raw) // self._history.unit
        asked = replace(note, check=self._check(self._history.raw, self.size))
        memory.put(self._question_name(), asked)
        memory.put(self._name, _behind(note, size, answer, self._check(raw, size)))

    def texts_behind(self, note: Note) -> list[str]:
        return self._history.texts_behind(note)

    def _check(self, raw: bytes, size: int) -> int:
        return int.from_bytes(self._history.key(raw, size, b"end")[:4], "little")


def _steps(border: int) -> list[int]:
    """Lengths of the steps between ``border`` and the next one, the longest first."""
    steps: list[int] = []
    step = _BORDER_UNITS
    while step < border >> _BORDER_GROWTH:
        steps.insert(0, step)
        step *= _STEPS
    return steps


def _borders(size: int) -> list[int]:
    """Positions up to ``size``: the same ones for every history, growing apart."""
    borders = []
    at = _BORDER_UNITS
    while at <= size:
        borders.append(at)
        at += max(_BORDER_UNITS, at >> _BORDER_GROWTH)
    return borders


def _read_tokens(body: Mapping[str, Any], tokens: list[Any]) -> RawHistory | None:
    try:
        raw = array("q", tokens).tobytes()
    except (TypeError, OverflowError):
        return None
    return RawHistory(_start(body, b"tokens"), raw, 8)
