"""The event heap: time moves only here."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Kernel:
    """Events in time order; events of one instant run first in, first out."""

    __slots__ = ("_heap", "_order", "events", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0

    def at(self, when_s: float, act: Callable[[Any], None], subject: Any = None) -> None:  # noqa: ANN401
        """Call ``act(subject)`` at ``when_s``, which must not lie in the past."""
        self._order += 1
        heapq.heappush(self._heap, (when_s, self._order, act, subject))

    def run(self, until_s: float = float("inf")) -> None:
        """Run events until none is left, or none up to and including ``until_s``."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, act, subject = pop(heap)
            self.events += 1
            act(subject)

    @property
    def next_at_s(self) -> float | None:
        """When the next event is due; ``None`` when nothing is left to happen."""
        return self._heap[0][0] if self._heap else None
