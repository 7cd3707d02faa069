"""Shared prefixes, and cascade attention's effect on them as a switch.

vLLM reads KV that *all* running requests share once per step instead of once per request. One
request outside the prefix switches that off for everybody as long as it runs
(``get_num_common_prefix_blocks`` counts blocks held by every request).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil

from ppdbench.sim.costs import CostTables, Line
from ppdbench.sim.node import Node
from ppdbench.sim.prefix_cache import PrefixCache

MIN_PREFIX_TOKENS = 256
MIN_REQUESTS = 8
TILE = 128


@dataclass(frozen=True, slots=True)
class SharedKey:
    """Content of one sequence whose first ``tokens`` are the prefix called ``prefix``."""

    prefix: str
    tokens: int
    own: str


class SharedPrefixCache(PrefixCache):
    """Blocks of a pinned prefix are there once, for any number of sequences at a time."""

    def __init__(self, total_blocks: int, block_tokens: int, *, enabled: bool = True) -> None:
        super().__init__(total_blocks, block_tokens, enabled=enabled)
        self._pinned: dict[str, int] = {}

    def pin(self, prefix: str, tokens: int) -> None:
        """Hold a prefix for good, as computed before the run."""
        self._pinned[prefix] = tokens // self.block_tokens
        self.grow(prefix, self._pinned[prefix])

    def hit_blocks(self, key: Hashable, matching_tokens: int) -> int:
        shared = self._shared_blocks(key)
        if shared is None:
            return super().hit_blocks(key, matching_tokens)
        return min(shared, matching_tokens // self.block_tokens)

    def take(self, key: Hashable, hit: int, fresh: int) -> None:
        if self._shared_blocks(key) is None:
            super().take(key, hit, fresh)
        else:
            self.grow(key, fresh)

    def release(self, key: Hashable, blocks: int, computed_tokens: int) -> None:
        shared = self._shared_blocks(key)
        if shared is None:
            super().release(key, blocks, computed_tokens)
        else:
            self.held -= max(0, blocks - shared)

    def _shared_blocks(self, key: Hashable) -> int | None:
        """Pinned blocks at the front of this content; ``None`` for content of its own."""
        if not isinstance(key, SharedKey) or key.prefix not in self._pinned:
            return None
        return min(self._pinned[key.prefix], key.tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What vLLM's rule looks at."""

    heads: int
    kv_heads: int
    multiprocessors: int = 132


def uses_cascade(shape: AttentionShape, prefix_tokens: int, requests: int) -> bool:
    """As ``use_cascade_attention`` of vLLM decides for a pure decode step of an H100 (132 SMs).

    Compares waves of thread blocks: cascade reads each prefix tile once per head, flash decoding
    once per request and KV head.
    """
    if prefix_tokens < MIN_PREFIX_TOKENS or requests < MIN_REQUESTS:
        return False
    group = shape.heads // shape.kv_heads
    if group <= 1:
        return True
    tiles = ceil(prefix_tokens / TILE)
    cascade = ceil(shape.heads * ceil(requests / TILE) / shape.multiprocessors) * tiles
    flash = ceil(requests * shape.kv_heads * ceil(group / TILE) * tiles / shape.multiprocessors)
    return cascade < flash


class CascadeCosts(CostTables):
    """The costs of one node's steps, with shared prefixes read once where vLLM would do so.

    The prefix part is one attention of all decoding tokens, as queries, over the prefix; the rest
    is the usual decode attention over what each sequence has of its own.
    """

    def __init__(self, plain: CostTables, shape: AttentionShape) -> None:
        self.source = plain.source
        self._plain = plain
        self._shape = shape
        self._node: Node | None = None

    def serve(self, node: Node) -> None:
        """The node whose running sequences decide."""
        self._node = node

    def dense_s(self, tokens: int) -> float:
        return self._plain.dense_s(tokens)

    def prefill_attention_s(self, new: int, prefix: int) -> float:
        return self._plain.prefill_attention_s(new, prefix)

    def decode_line(self, batch: int, mean_context: float) -> Line:
        shared = self.common_prefix_tokens()
        if not uses_cascade(self._shape, shared, batch):
            return self._plain.decode_line(batch, mean_context)
        own = self._plain.decode_line(batch, max(0.0, mean_context - shared))
        prefix_s = self._plain.prefill_attention_s(batch, shared)
        return Line(own.at_s + prefix_s, own.slope_s, own.tokens)

    def common_prefix_tokens(self) -> int:
        """Tokens at the front that every running sequence holds the same blocks of."""
        assert self._node is not None
        keys = [sequence.key for sequence in self._node.running]
        shared = [key for key in keys if isinstance(key, SharedKey)]
        if not keys or len(shared) < len(keys) or len({key.prefix for key in shared}) > 1:
            return 0
        return min(key.tokens for key in shared)
