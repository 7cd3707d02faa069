"""A prefix cache by content: for nodes that see real prompts, and to test the fast one.

Like :class:`ppdbench.sim.prefix_cache.PrefixCache`, but a key stands for the content
of one sequence, sequences that begin alike share blocks, and everything costs per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol


class Content(Protocol):
    """Names the full blocks of a sequence: equal names, equal tokens up to that block's end."""

    def block_names(self, tokens: int) -> Sequence[Hashable]:
        """Names of the blocks that the first ``tokens`` fill; fewer where more is not known."""
        ...


class TokenContent:
    """Content that is token ids; a block's name depends on every token before its end."""

    __slots__ = ("_block_tokens", "_ids", "_names", "_salt")

    def __init__(self, ids: Sequence[int], block_tokens: int, salt: str = "") -> None:
        self._ids = list(ids)
        self._block_tokens = block_tokens
        self._names: list[Hashable] = []
        self._salt = salt

    def extend(self, ids: Sequence[int]) -> None:
        self._ids += ids

    def block_names(self, tokens: int) -> Sequence[Hashable]:
        size, names = self._block_tokens, self._names
        known = min(tokens, len(self._ids)) // size
        while len(names) < known:
            start = len(names) * size
            before = names[-1] if names else self._salt
            names.append(hash((before, *self._ids[start : start + size])))
        return names[:known]


class ContentCache:
    """See the module. ``held + cached = total``: any free block may hold content."""

    def __init__(self, total_blocks: int, block_tokens: int, *, enabled: bool = True) -> None:
        self.total = total_blocks
        self.block_tokens = block_tokens
        self._enabled = enabled
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))
        self._users = [0] * total_blocks
        self._name_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}
        self._blocks: dict[Content, list[int]] = {}

    def __repr__(self) -> str:
        return f"<ContentCache held {self.held} cached {self.cached} of {self.total} blocks>"

    @property
    def held(self) -> int:
        return self.total - len(self._free)

    @property
    def cached(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def hit_blocks(self, key: Content, matching_tokens: int) -> int:
        """Blocks at the front of the content that are here."""
        hit = 0
        for name in key.block_names(matching_tokens):
            if name not in self._block_of:
                break
            hit += 1
        return hit

    def fits(self, blocks: int) -> bool:
        """Whether so many blocks more can be held, none of them free and cached for the asker."""
        return blocks <= len(self._free)

    def take(self, key: Content, hit: int, fresh: int) -> None:
        names = key.block_names(hit * self.block_tokens)
        mine = self._blocks[key] = [self._block_of[name] for name in names]
        for block in mine:
            self._free.pop(block, None)
            self._users[block] += 1
        self.grow(key, fresh)

    def grow(self, key: Content, blocks: int) -> None:
        mine = self._blocks[key]
        for _ in range(blocks):
            block, _ = self._free.popitem(last=False)
            self._unname(block)
            self._users[block] = 1
            mine.append(block)
        self._name(key, len(mine) * self.block_tokens)

    def release(self, key: Content, blocks: int, computed_tokens: int) -> None:  # noqa: ARG002
        """Give the sequence's blocks back, the last one first in line for reuse."""
        mine = self._blocks.pop(key, [])
        self._forget_beyond(mine, computed_tokens)
        if self._enabled:
            for block, name in zip(mine, key.block_names(computed_tokens), strict=False):
                self._set_name(block, name)
        for block in reversed(mine):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def clear(self) -> None:
        """Forget every content that nobody holds."""
        for block in self._free:
            self._unname(block)

    def _name(self, key: Content, tokens: int) -> None:
        """As in vLLM a block can be found once it is scheduled, not computed."""
        if self._enabled:
            for block, name in zip(self._blocks[key], key.block_names(tokens), strict=False):
                self._set_name(block, name)

    def _set_name(self, block: int, name: Hashable) -> None:
        if block not in self._name_of and name not in self._block_of:
            self._name_of[block] = name
            self._block_of[name] = block

    def _unname(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

    def _forget_beyond(self, blocks: Sequence[int], computed_tokens: int) -> None:
        """Blocks that were promised and never computed hold nothing."""
        for block in blocks[computed_tokens // self.block_tokens :]:
            if self._users[block] == 1:
                self._unname(block)
