"""The last decisions and what came of them, of all workers, in shared memory; JSONL on request."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from mmap import mmap
from pathlib import Path
from typing import IO, Any

import orjson

SLOTS = 512
SLOT_BYTES = 1024
_HEAD = struct.Struct("<dI")


class Receipts:
    """A ring of :data:`SLOTS` receipts per worker. ``record`` writes only this worker's ring.

    A receipt holds counts, names and times, never a prompt's or an answer's text. One that is too
    long for its slot is left out of the ring, not cut.
    """

    def __init__(
        self, buffer: mmap, offset: int, workers: int, worker: int, log: Path | None = None
    ) -> None:
        self._buffer = buffer
        self._offset = offset
        self._workers = workers
        self._base = offset + worker * SLOTS * SLOT_BYTES
        self._next = 0
        self._log: IO[bytes] | None = None if log is None else log.open("ab", buffering=0)

    @staticmethod
    def bytes_for(workers: int) -> int:
        return workers * SLOTS * SLOT_BYTES

    def record(self, receipt: Mapping[str, Any], at_s: float) -> None:
        """Keep a receipt."""
        raw = orjson.dumps(receipt)
        if self._log is not None:
            self._log.write(raw + b"\n")
        if len(raw) > SLOT_BYTES - _HEAD.size:
            return
        start = self._base + self._next * SLOT_BYTES
        self._next = (self._next + 1) % SLOTS
        self._buffer[start : start + _HEAD.size + len(raw)] = _HEAD.pack(at_s, len(raw)) + raw

    def latest(self, limit: int) -> list[dict[str, Any]]:
        """The newest first. A slot that is being written is left out."""
        found = []
        for at in range(self._workers * SLOTS):
            start = self._offset + at * SLOT_BYTES
            at_s, length = _HEAD.unpack_from(self._buffer, start)
            if length:
                begin = start + _HEAD.size
                found.append((at_s, self._buffer[begin : begin + length]))
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [parsed for _, raw in found[:limit] if (parsed := _parsed(raw)) is not None]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        receipt: dict[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return receipt
