"""How many hand-offs a P has out at once; those above the limit wait in order."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

Begin = Callable[[], bool]
"""Starts a hand-off; False when it is no longer wanted."""


class HandOffGate:
    """At most ``limit`` hand-offs per P; None admits all.

    A hand-off lasts from the request to P until D's first answer: so long P holds blocks for it,
    under a lease that runs out when D has to wait.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._out: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[Begin]] = defaultdict(deque)
        self.waited = 0

    def __repr__(self) -> str:
        return f"<HandOffGate {dict(self._out)} of {self._limit}, {self.waited} waited>"

    def enter(self, node: str, begin: Begin) -> None:
        """Call ``begin`` now, or as soon as ``node`` has room."""
        if self._full(node):
            self.waited += 1
            self._waiting[node].append(begin)
        else:
            self._begin(node, begin)

    def leave(self, node: str) -> None:
        """One hand-off that ``begin`` started is over."""
        self._out[node] -= 1
        waiting = self._waiting[node]
        while waiting and not self._full(node):
            self._begin(node, waiting.popleft())

    def _full(self, node: str) -> bool:
        return self._limit is not None and self._out[node] >= self._limit

    def _begin(self, node: str, begin: Begin) -> None:
        # Counted before it starts: it may fail, and leave, at once.
        self._out[node] += 1
        if not begin():
            self._out[node] -= 1
