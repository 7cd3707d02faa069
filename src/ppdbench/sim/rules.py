"""What the values of a setting may be: one table of rules per kind of table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ppdbench.core.errors import UsageError

MOST_TOKENS = 1_000_000
"""Of a step or a block: cost tables have an entry for each."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values are taken, and the words for that. ``optional`` takes ``None`` too."""

    takes: Callable[[Any], bool]
    expected: str
    optional: bool = False


def check(what: str, holder: object, rules: Mapping[str, Rule]) -> None:
    """Raises UsageError for the first attribute of ``holder`` that breaks its rule."""
    for name, rule in rules.items():
        value = getattr(holder, name)
        if not (rule.takes(value) or (rule.optional and value is None)):
            raise UsageError(f"{what} {name} is {value!r}; expected {rule.expected}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TEXT = Rule(lambda v: isinstance(v, str), "a text")
SWITCH = Rule(lambda v: isinstance(v, bool), "true or false")
COUNT = Rule(lambda v: _whole(v) and v >= 1, "a whole number from 1 on")
COUNT_OR_NONE = Rule(COUNT.takes, COUNT.expected, optional=True)
COUNT_FROM_0 = Rule(lambda v: _whole(v) and v >= 0, "a whole number from 0 on")
TOKENS = Rule(
    lambda v: _whole(v) and 1 <= v <= MOST_TOKENS, f"a whole number from 1 to {MOST_TOKENS:,}"
)
POSITIVE = Rule(lambda v: _number(v) and v > 0, "a number above 0")
NOT_NEGATIVE = Rule(lambda v: _number(v) and v >= 0, "a number from 0 on")
NOT_NEGATIVE_OR_NONE = Rule(NOT_NEGATIVE.takes, NOT_NEGATIVE.expected, optional=True)
SHARE = Rule(lambda v: _number(v) and 0 <= v <= 1, "a share from 0 to 1")
"""For chances too."""
