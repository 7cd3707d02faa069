"""A prefix cache in blocks, by content, without a limit: what vLLM's would find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class PrefixCache:
    """Whole blocks only; a prompt's last token is never served from it. Size 0 turns it off."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: set[int] = set()

    def __repr__(self) -> str:
        return f"<PrefixCache {self.blocks} blocks of {self.block_size}>"

    @property
    def blocks(self) -> int:
        return len(self._known)

    def match(self, ids: Sequence[int], salt: str = "") -> int:
        """How many tokens at the start of ``ids`` are known."""
        found = 0
        for block in self._blocks(ids[:-1], salt):
            if block not in self._known:
                break
            found += self.block_size
        return found

    def store(self, ids: Sequence[int], salt: str = "") -> None:
        """Remember every whole block; the last token has no KV yet."""
        self._known.update(self._blocks(ids[:-1], salt))

    def clear(self) -> None:
        self._known.clear()

    def _blocks(self, ids: Sequence[int], salt: str) -> Iterator[int]:
        """A chained key per whole block: equal keys mean equal prefixes."""
        key = hash(salt)
        for end in range(self.block_size, len(ids) + 1, self.block_size) if self.block_size else ():
            key = hash((key, *ids[end - self.block_size : end]))
            yield key
