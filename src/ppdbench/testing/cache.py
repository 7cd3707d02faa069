"""A prefix cache in blocks, by content, without a limit: what vLLM's would find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class PrefixCache:
    """Whole blocks only; a prompt's last token is never served from it. Size 0 turns it off."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: set[int] = set()

    def __repr__(self) -> str:
        return f"<PrefixCache {self.blocks} blocks of {self._size}>"

    @property
    def blocks(self) -> int:
        return len(self._known)

    def match(self, ids: Sequence[int], salt: str = "") -> int:
        """How many tokens at the start of ``ids`` are known."""
        found = 0
        for block in self._blocks(ids[:-1], salt):
            if block not in self._known:
                break
            found += self._size
        return found

    def store(self, ids: Sequence[int], salt: str = "") -> None:
        """Remember every whole block; the last token has no KV yet."""
        self._known.update(self._blocks(ids[:-1], salt))

    def clear(self) -> None:
        self._known.clear()

    def _blocks(self, ids: Sequence[int], salt: str) -> Iterator[int]:
        """A chained key per whole block: equal keys mean equal prefixes."""
        key = hash(salt)
        for end in range(self._size, len(ids) + 1, self._size) if self._size else ():
            key = hash((key, *ids[end - self._size : end]))
            yield key
