"""How deep JSON may nest. Exports need about ten levels; what nests more could take all memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST_LEVELS = 100

_OPENS = frozenset({"start_map", "start_array"})
_CLOSES = frozenset({"end_map", "end_array"})


class TooDeepError(ValueError):
    """JSON that nests more than :data:`MOST_LEVELS`."""

    def __init__(self) -> None:
        super().__init__(f"nested more than {MOST_LEVELS} levels deep")


def shallow(events: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same events of ijson's ``basic_parse``; raises TooDeepError at the level too many.

    It must stand before ``parse``, whose prefixes grow with the square of the depth.
    """
    level = 0
    for event in events:
        kind = event[0]
        if kind in _OPENS:
            level += 1
            if level > MOST_LEVELS:
                raise TooDeepError
        elif kind in _CLOSES:
            level -= 1
        yield event


def is_deep(value: object) -> bool:
    """Whether parsed JSON nests more than is allowed; takes no recursion."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [child for parent in level for child in _inside(parent)]
        if not level:
            return False
    return True


def _inside(value: object) -> list[object]:
    """The lists and objects directly in ``value``."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [child for child in value if isinstance(child, dict | list)]
