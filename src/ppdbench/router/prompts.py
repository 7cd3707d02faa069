"""Histories of raw prompts, text or token ids, in which no message ends show."""

from __future__ import annotations

from array import array
from collections.abc import Collection

import xxhash
from msgspec.structs import replace

from ppdbench.router.history import MAX_LOOKUPS, Answer, Found, Place, leave_note, note_behind
from ppdbench.router.memory import ANSWERED, MOST_SIZES, Memory, Note

_BORDER_UNITS = 16
_BORDER_GROWTH = 4
"""Borders of raw prompts stand 16 units apart, later 1/16 of what stands before them."""

_STEPS = 16
"""Between two borders are steps of 16 units, sixteen of which make a longer one, and so on."""


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
            behind = note_behind(note, len(raw) // self.unit, answer)
            self._leave(memory, raw, behind, behind_answer=True)

    def _leave(self, memory: Memory, raw: bytes, note: Note, *, behind_answer: bool) -> None:
        leave_note(memory, self.key(raw, note.size, b"end"), note, behind_answer=behind_answer)
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
        memory.put(self._name, note_behind(note, size, answer, self._check(raw, size)))

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
