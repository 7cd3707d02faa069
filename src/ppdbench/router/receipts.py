"""The last decisions and what came of them, of all workers, in shared memory; JSONL on request."""

from __future__ import annotations

import logging
import struct
from collections import deque
from mmap import mmap
from os import fstat
from os.path import samestat
from pathlib import Path
from typing import IO, Any

import orjson
from msgspec import Struct

from ppdbench.core.decision import Decision, Features
from ppdbench.router.answer import Counted
from ppdbench.router.choose import Plan

log = logging.getLogger("ppdbench.router")
SLOTS = 512
SLOT_BYTES = 1024
_HEAD = struct.Struct("<dI")


class Receipt(Struct, frozen=True):
    """Why a turn went where it went, and what came of it.

    Hundreds are kept, so none holds on to its turn's messages. ``at_s`` is when it came, by the
    wall clock: in a state file there may be some of before a reboot.
    """

    conversation: int
    features: Features
    decision: Decision
    node: str
    prefill_node: str | None
    shadow: Decision | None
    outcome: str
    ttft_s: float | None
    tpot_s: float | None
    counted: Counted
    at_s: float

    @classmethod
    def of(  # noqa: PLR0913, PLR0917  (what came of a plan)
        cls,
        plan: Plan,
        outcome: str,
        ttft_s: float | None,
        tpot_s: float | None,
        counted: Counted,
        at_s: float,
    ) -> Receipt:
        prefill = plan.prefill
        return cls(
            plan.speaker.conversation,
            plan.features,
            plan.decision,
            plan.home.name,
            None if prefill is None else prefill.name,
            plan.shadow,
            outcome,
            ttft_s,
            tpot_s,
            counted,
            at_s,
        )

    def document(self) -> dict[str, Any]:
        """Counts, names and times, never a prompt's or an answer's text."""
        features, decision, counted = self.features, self.decision, self.counted
        return {
            "at_s": round(self.at_s, 3),
            "conversation": f"{self.conversation:016x}",
            "turn": features.turn,
            "route": decision.route.value,
            "reason": decision.reason,
            "node": self.node,
            "prefill_node": self.prefill_node,
            "cell": decision.cell,
            "score": decision.score,
            "context_tokens": features.context_tokens,
            "new_tokens": features.new_tokens,
            "output_tokens": features.output_tokens,
            "rate_per_s": features.rate_per_s,
            "running": features.running,
            "outcome": self.outcome,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "counted_prompt_tokens": counted.prompt_tokens,
            "counted_output_tokens": counted.output_tokens,
            "cached_tokens": counted.cached_tokens,
            **_shadow(self.shadow),
        }


def _shadow(decision: Decision | None) -> dict[str, Any]:
    """What the policy that is only asked would have done."""
    if decision is None:
        return {}
    return {
        "shadow_route": decision.route.value,
        "shadow_reason": decision.reason,
        "shadow_cell": decision.cell,
        "shadow_score": decision.score,
    }


class Receipts:
    """A ring of :data:`SLOTS` receipts per worker; only its own worker writes it.

    ``record`` only keeps a receipt; :meth:`share`, a few times a second, writes those that would
    still be in the ring. With a log each one is written at once. One too long for its slot is
    left out of the ring, not cut.
    """

    def __init__(
        self, buffer: mmap, offset: int, workers: int, worker: int, path: Path | None = None
    ) -> None:
        self._buffer = buffer
        self._offset = offset
        self._workers = workers
        self._worker = worker
        self._base = offset + worker * SLOTS * SLOT_BYTES
        self._next = 0
        self._pending: deque[Receipt] = deque(maxlen=SLOTS)
        self._path = path
        self._log: IO[bytes] | None = None
        self._log_fails = False
        self._log_cut = False
        if path is not None:
            self._follow(path)

    @staticmethod
    def bytes_for(workers: int) -> int:
        return workers * SLOTS * SLOT_BYTES

    def record(self, receipt: Receipt) -> None:
        """Keep a receipt."""
        self._pending.append(receipt)
        if self._log is not None:
            self._append(self._log, self._rendered(receipt) + b"\n")

    def share(self) -> None:
        """Show the other workers what is kept; alone, nobody sees it before :meth:`latest`.

        A log that was moved away or removed, as those who rotate logs do, is begun anew.
        """
        if self._workers > 1:
            self._flush()
        if self._path is not None:
            self._follow(self._path)

    def _follow(self, path: Path) -> None:
        """Open the file at ``path`` unless it is open; where that fails the one in use goes on."""
        before = self._log
        try:
            if before is not None and _is_at(before, path):
                return
            self._log = path.open("ab", buffering=0)
        except OSError as error:
            if before is None:
                self._say_failing(path, error, "turns go on without it")
            return
        self._log_cut = False
        if before is not None:
            before.close()

    def _say_failing(self, path: object, error: OSError, advice: str) -> None:
        """Once, until it can be written again."""
        if not self._log_fails:
            log.error("decisions log %s: %s; %s", path, error.strerror, advice)
        self._log_fails = True

    def _append(self, file: IO[bytes], line: bytes) -> None:
        """A log that cannot be written, as on a full disk, stops no turn; it is said once."""
        # What was cut off by a full disk stays a line of its own.
        line = b"\n" + line if self._log_cut else line
        try:
            written = file.write(line)
        except OSError as error:
            self._say_failing(file.name, error, "free some room")
        else:
            self._log_fails = False
            self._log_cut = written != len(line)

    def _flush(self) -> None:
        while self._pending:
            receipt = self._pending.popleft()
            self._write(self._rendered(receipt), receipt.at_s)

    def _rendered(self, receipt: Receipt) -> bytes:
        return orjson.dumps({**receipt.document(), "worker": self._worker})

    def _write(self, raw: bytes, at_s: float) -> None:
        if len(raw) > SLOT_BYTES - _HEAD.size:
            return
        start = self._base + self._next * SLOT_BYTES
        self._next = (self._next + 1) % SLOTS
        self._buffer[start : start + _HEAD.size + len(raw)] = _HEAD.pack(at_s, len(raw)) + raw

    def latest(self, limit: int) -> list[dict[str, Any]]:
        """The newest first. A slot that is being written is left out."""
        self._flush()
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


def _is_at(file: IO[bytes], path: Path) -> bool:
    return path.exists() and samestat(path.stat(), fstat(file.fileno()))


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        receipt: dict[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return receipt
