"""When each step of a node ended: for the gaps between tokens, and for traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""Tokens of a sequence: the step that gave the first of them (from 0), and how many followed."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in a row. Step i (from 0) takes ``first_s + i·slope_s``."""

    from_s: float
    first_s: float
    slope_s: float
    steps: int
    batch: int
    prompt_tokens: int

    @property
    def seconds(self) -> float:
        return self.steps * self.first_s + self.slope_s * self.steps * (self.steps - 1) / 2


class StepLog:
    """All stretches of one node, in order."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []

    def ends_s(self) -> NDArray[np.float64]:
        """The instant at which each step ended."""
        steps = np.array([s.steps for s in self.stretches], dtype=np.int64)
        rows = np.array([(s.from_s, s.first_s, s.slope_s) for s in self.stretches]).reshape(-1, 3)
        before = np.repeat(np.cumsum(steps) - steps, steps)
        ordinal = np.arange(before.size) - before + 1.0
        from_s, first_s, slope_s = np.repeat(rows, steps, axis=0).T
        ends: NDArray[np.float64] = (
            from_s + ordinal * first_s + slope_s * ordinal * (ordinal - 1) / 2
        )
        return ends


def token_times_s(ends_s: NDArray[np.float64], spans: list[Span]) -> list[float]:
    """Instants of a sequence's tokens; a preempted one has several spans."""
    parts = [ends_s[first : first + more + 1] for first, more in spans]
    times: list[float] = np.concatenate(parts).tolist()
    return times
