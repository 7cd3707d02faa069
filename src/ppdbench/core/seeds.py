"""One root seed, many independent named streams; never Python's salted ``hash``."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def seed_for(root: int, *names: object) -> int:
    """A 63-bit seed for the stream called ``names`` under ``root``; stable across processes."""
    text = "\x1f".join([str(root), *map(str, names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rng_for(root: int, *names: object) -> np.random.Generator:
    import numpy as np  # here, so that a router that draws no numbers loads none

    return np.random.Generator(np.random.PCG64(seed_for(root, *names)))


def unit_interval(key: str, seed: int = 0) -> float:
    """A lot in [0, 1) that depends on ``key`` and ``seed`` alone."""
    return seed_for(seed, key) / 2.0**63
