"""What a node asks of its KV memory; two implementations: by conversation and by content."""

from __future__ import annotations

from typing import Any, Protocol


class KvBlocks(Protocol):
    """Counts blocks; ``held + cached ≤ total``. A key names the content of one sequence."""

    total: int
    block_tokens: int

    @property
    def held(self) -> int: ...
    @property
    def cached(self) -> int:
        """Free blocks whose content may still be found."""
        ...

    def blocks_for(self, tokens: int) -> int: ...
    def hit_blocks(self, key: Any, matching_tokens: int) -> int:  # noqa: ANN401
        """Cached blocks at the front of a prompt whose first ``matching_tokens`` are the key's."""
        ...

    def fits(self, blocks: int) -> bool: ...
    def take(self, key: Any, hit: int, fresh: int) -> None:  # noqa: ANN401
        """Hold ``hit`` cached blocks and ``fresh`` others; check :meth:`fits` first."""
        ...

    def grow(self, key: Any, blocks: int) -> None:  # noqa: ANN401
        """Hold more blocks; the caller has seen to it that they fit."""
        ...

    def release(self, key: Any, blocks: int, computed_tokens: int) -> None:  # noqa: ANN401
        """Give back a sequence's blocks; those full of computed tokens stay findable."""
        ...
