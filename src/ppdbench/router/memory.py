"""What the router remembers of conversations: a bounded table of notes in shared memory.

All workers map the same bytes, so a turn may reach any of them. A note is 40 bytes under a 128-bit
key; eight share a bucket and the longest unused of a full bucket goes. Nobody takes a lock: a note
carries a checksum, and one that was torn by two writers reads as unknown, which is always safe.
"""

from __future__ import annotations

import struct
from mmap import mmap
from zlib import crc32

from msgspec import Struct
from msgspec.structs import astuple

KEY_BYTES = 16
_WAYS = 8
_BODY = struct.Struct("<QIIIHHIHHI")
_CHECKED_BYTES = _BODY.size
_NOTE_BYTES = _CHECKED_BYTES + 4
_KEYS_BYTES = _WAYS * KEY_BYTES
_WORD_BYTES = 8
_BUCKET_BYTES = _WAYS * (KEY_BYTES + _NOTE_BYTES)
_USED_OFFSET = 8 + 4 + 4
_USED = struct.Struct("<I")
_CRC = struct.Struct("<I")
_FIRST_BYTES = struct.Struct("<I")
_CRC_OF_A_WHOLE = 0x2144DF1C
"""What crc32 makes of anything that ends with its own crc32."""
_EMPTY = bytes(KEY_BYTES)

ANSWERED = 1
"""The note stands behind an answer; without it, behind the question alone."""

SEVERAL = 2
"""More than one conversation left this very note."""

SPLIT = 4
"""… and they live on different nodes, so the note names no home."""

REASONED_STEPS = 16
"""The history holds reasoning before tool calls: prompts have it until the next question."""

NO_PREFILL = 0xFF
_PREFILL_SHIFT = 8
"""The flags' upper byte is one more than the number of the P, 0 where there was none."""

MOST_ANSWER_TOKENS = 0xFFFF
MOST_TURN = 0xFFFF
MOST_EPOCH = 0xFFFFFFFF

MOST_SIZES = 4
"""That a directory names: the newest."""

_DIRECTORY = 8
_FLAGS_AT = 7


class Note(Struct, frozen=True):
    """What is known at one place of a history.

    ``context_tokens`` is the server's count up to here, ``size`` the client-side length
    (characters or tokens), ``used_s`` seconds of the memory's clock, ``epoch`` the incarnation
    of the home that computed it. ``answer_tokens`` are those of ``context_tokens`` that it computed
    as its last answer, at most ``MOST_ANSWER_TOKENS``. ``check`` hashes the history where the key
    does not.
    """

    conversation: int
    context_tokens: int
    size: int
    used_s: int
    home: int
    turn: int
    epoch: int
    flags: int
    answer_tokens: int = 0
    check: int = 0

    @property
    def prefill(self) -> int:
        """The number of the P that last computed this conversation, else ``NO_PREFILL``."""
        return (self.flags >> _PREFILL_SHIFT) - 1 & 0xFF


def prefill_flags(number: int) -> int:
    """Flags that name a P; the 255 first nodes of a cluster have a name here."""
    return (number + 1 & 0xFF) << _PREFILL_SHIFT if number < NO_PREFILL else 0


class Memory:
    """Notes by key in ``buffer[offset:]``.

    ``evicted`` and ``torn`` count since this worker's start.
    """

    def __init__(self, buffer: mmap, offset: int, buckets: int) -> None:
        assert buckets & (buckets - 1) == 0, "a power of two"
        self._buffer = buffer
        self._offset = offset
        self._mask = buckets - 1
        self.evicted = 0
        self.torn = 0

    def __repr__(self) -> str:
        return f"<Memory of {self.capacity} notes, {self.evicted} evicted>"

    @staticmethod
    def bytes_for(buckets: int) -> int:
        return buckets * _BUCKET_BYTES

    @staticmethod
    def buckets_for(notes: int) -> int:
        """The power of two that holds at least ``notes``."""
        return 1 << max(0, (max(1, notes) - 1) // _WAYS).bit_length()

    @property
    def capacity(self) -> int:
        return (self._mask + 1) * _WAYS

    def used(self) -> int:
        """Notes held now; reads the whole table, by columns, as turns wait meanwhile."""
        end = self._offset + Memory.bytes_for(self._mask + 1)
        step = _BUCKET_BYTES // _WORD_BYTES
        with memoryview(self._buffer) as all_bytes, all_bytes[self._offset : end] as raw:
            words = raw.cast("Q")
            firsts = range(0, _KEYS_BYTES // _WORD_BYTES, KEY_BYTES // _WORD_BYTES)
            empty = sum(words[at::step].tolist().count(0) for at in firsts)
            words.release()
        return self.capacity - empty

    def get(self, key: bytes) -> Note | None:
        """The note under ``key``, if it is whole."""
        raw = self._read(key)
        if raw is None:
            return None
        fields = _BODY.unpack_from(raw)
        return None if fields[_FLAGS_AT] & _DIRECTORY else Note(*fields)

    def put(self, key: bytes, note: Note) -> None:
        """Write or overwrite; what no engine serves has no room here, and stays unknown."""
        try:
            body = _BODY.pack(*astuple(note))
        except struct.error:
            return
        self._write(key, body, note.used_s)

    def sizes(self, key: bytes) -> tuple[int, ...]:
        """Lengths of raw histories that pass through the border ``key``, newest first."""
        raw = self._read(key)
        if raw is None or not _BODY.unpack_from(raw)[_FLAGS_AT] & _DIRECTORY:
            return ()
        return tuple(size for size in _sizes_in(raw) if size)

    def add_size(self, key: bytes, size: int, now_s: int) -> None:
        """Say that a history of ``size`` passes through ``key``."""
        known = [other for other in self.sizes(key) if other != size]
        self._write(key, _directory([size, *known], now_s), now_s)

    def _bucket(self, key: bytes) -> int:
        first: int = _FIRST_BYTES.unpack_from(key)[0]
        return self._offset + (first & self._mask) * _BUCKET_BYTES

    def _way(self, bucket: int, key: bytes) -> int | None:
        at = self._buffer.find(key, bucket, bucket + _KEYS_BYTES) - bucket
        return None if at < 0 or at % KEY_BYTES else at // KEY_BYTES

    def _read(self, key: bytes) -> bytes | None:
        bucket = self._bucket(key)
        way = self._way(bucket, key)
        if way is None:
            return None
        start = bucket + _KEYS_BYTES + way * _NOTE_BYTES
        raw = self._buffer[start : start + _NOTE_BYTES]
        if crc32(raw, key[0]) != _CRC_OF_A_WHOLE:
            self.torn += 1
            return None
        return raw

    def _write(self, key: bytes, body: bytes, now_s: int) -> None:
        bucket = self._bucket(key)
        way = self._way(bucket, key)
        if way is None:
            way = self._free_way(bucket, now_s)
        start = bucket + _KEYS_BYTES + way * _NOTE_BYTES
        self._buffer[start : start + _NOTE_BYTES] = body + _CRC.pack(crc32(body, key[0]))
        self._buffer[bucket + way * KEY_BYTES : bucket + (way + 1) * KEY_BYTES] = key

    def _free_way(self, bucket: int, now_s: int) -> int:
        free = self._way(bucket, _EMPTY)
        if free is not None:
            return free
        base = bucket + _KEYS_BYTES + _USED_OFFSET
        ages = [
            (now_s - int(_USED.unpack_from(self._buffer, base + way * _NOTE_BYTES)[0]), way)
            for way in range(_WAYS)
        ]
        oldest = max(ages)[1]
        # A key that ends in a zero byte hides a free way behind it, which is the oldest then.
        start = bucket + oldest * KEY_BYTES
        self.evicted += self._buffer[start : start + KEY_BYTES] != _EMPTY
        return oldest


def _directory(sizes: list[int], now_s: int) -> bytes:
    """A note body whose fields hold up to four sizes; ``used_s`` and ``flags`` keep their place."""
    four = [*sizes, 0, 0, 0, 0][:MOST_SIZES]
    return _BODY.pack(four[0] | four[1] << 32, four[2], four[3], now_s, 0, 0, 0, _DIRECTORY, 0, 0)


def _sizes_in(raw: bytes) -> tuple[int, ...]:
    first_two, third, fourth, *_ = _BODY.unpack_from(raw)
    return (first_two & 0xFFFFFFFF, first_two >> 32, third, fourth)
