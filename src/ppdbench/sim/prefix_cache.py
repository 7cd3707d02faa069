"""KV blocks of one node: who holds how many, and which conversations are still cached.

vLLM keeps free blocks in one queue; a freed sequence joins its tail with its last block first, and
allocation takes from its head. A conversation's blocks form one chain, so a *run* (chain, count)
stands for all of its free blocks at once and eviction shortens the oldest run from its end. That
gives the same hits and evictions as a queue of single blocks at a cost per sequence, not per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Run:
    """Free blocks of one released sequence; the first ``full`` of them can be found again."""

    key: Hashable | None
    blocks: int
    full: int


class PrefixCache:
    """Counts blocks; ``held + cached ≤ total`` after every call.

    Content is named by ``key`` (a conversation). Two sequences of one key at the same time do not
    share: the second finds nothing.
    """

    def __init__(self, total_blocks: int, block_tokens: int, *, enabled: bool = True) -> None:
        self.total = total_blocks
        self.block_tokens = block_tokens
        self.held = 0
        self.cached = 0
        self._enabled = enabled
        self._runs: OrderedDict[int, _Run] = OrderedDict()  # its first is found in constant time
        self._run_of: dict[Hashable, int] = {}
        self._stamp = 0

    def __repr__(self) -> str:
        return f"<PrefixCache held {self.held} cached {self.cached} of {self.total} blocks>"

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def hit_blocks(self, key: Hashable, matching_tokens: int) -> int:
        """Cached blocks at the front of a prompt whose first ``matching_tokens`` are ``key``'s."""
        stamp = self._run_of.get(key)
        if stamp is None:
            return 0
        return min(self._runs[stamp].full, matching_tokens // self.block_tokens)

    def fits(self, blocks: int) -> bool:
        return self.held + blocks <= self.total

    def take(self, key: Hashable, hit: int, fresh: int) -> None:
        """Hold ``hit`` cached blocks of ``key`` and ``fresh`` others; check :meth:`fits` first."""
        if hit:
            self._claim(self._run_of.pop(key), hit)
        self.held += hit + fresh
        self.trim()

    def grow(self, key: Hashable, blocks: int) -> None:  # noqa: ARG002 - ContentCache needs it
        """Hold more blocks; the caller has seen to it that they fit."""
        self.held += blocks
        self.trim()

    def trim(self) -> None:
        """Evict from the oldest runs until held and cached blocks fit."""
        excess = self.held + self.cached - self.total
        while excess > 0:
            stamp = next(iter(self._runs))
            excess -= self._shorten(stamp, excess)

    def release(self, key: Hashable, blocks: int, computed_tokens: int) -> None:
        """Give back a sequence's blocks; those full of computed tokens stay findable."""
        self.held -= blocks
        if not blocks or not self._enabled:
            return
        self._forget(key)
        self._stamp += 1
        full = min(blocks, computed_tokens // self.block_tokens)
        self._runs[self._stamp] = _Run(key, blocks, full)
        self._run_of[key] = self._stamp
        self.cached += blocks

    def clear(self) -> None:
        """Forget everything that nobody holds."""
        self._runs.clear()
        self._run_of.clear()
        self.cached = 0

    def _claim(self, stamp: int, hit: int) -> None:
        run = self._runs[stamp]
        self.cached -= hit
        if run.blocks == hit:
            del self._runs[stamp]
        else:
            self._runs[stamp] = _Run(None, run.blocks - hit, 0)

    def _forget(self, key: Hashable) -> None:
        """What stands under ``key`` can no longer be found; it stays in line for reuse."""
        stamp = self._run_of.pop(key, None)
        if stamp is not None:
            run = self._runs[stamp]
            run.key, run.full = None, 0

    def _shorten(self, stamp: int, excess: int) -> int:
        run = self._runs[stamp]
        gone = min(run.blocks, excess)
        self.cached -= gone
        if gone == run.blocks:
            del self._runs[stamp]
            if run.key is not None:
                self._run_of.pop(run.key, None)
        else:
            run.blocks -= gone
            run.full = min(run.full, run.blocks)
        return gone
