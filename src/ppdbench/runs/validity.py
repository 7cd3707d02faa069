"""Codes that say why a point may not vote. An empty list is good."""

from __future__ import annotations

from enum import StrEnum


class Validity(StrEnum):
    """See ``docs/metrics.md`` for each code's rule."""

    CLIENT_LIMITED = "client_limited"
    CACHE_CONTAMINATED = "cache_contaminated"
    PATH_UNPROVEN = "path_unproven"
    WRONG_LENGTHS = "wrong_lengths"
    ENGINE_FAILED = "engine_failed"
    ERRORS = "errors"
    TOO_FEW = "too_few"


NEVER_VOTES = frozenset(
    {
        Validity.CLIENT_LIMITED,
        Validity.CACHE_CONTAMINATED,
        Validity.PATH_UNPROVEN,
        Validity.WRONG_LENGTHS,
        Validity.ENGINE_FAILED,
    }
)
"""``errors`` and ``too_few`` are flags that ``build-table`` weighs; these five are final."""

MIN_SUCCESS = 0.95
MIN_LATER_TURNS = 30
