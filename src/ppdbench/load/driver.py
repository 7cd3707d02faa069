"""Runs a :class:`Play` on a timeline against a server of turns.

The timeline is the wall clock (:mod:`ppdbench.load.clock`) or the simulator's event heap; the
server of turns is a cluster behind HTTP or a simulated one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ppdbench.core.conversation import Arrival, Conversation
from ppdbench.load.conversation import Dialogue, Play
from ppdbench.runs.records import TurnRecord

Done = Callable[[Dialogue, TurnRecord], None]


class Timeline(Protocol):
    """Seconds from the start of the point, and calls in the order of their instants."""

    @property
    def now_s(self) -> float: ...

    def at(self, when_s: float, act: Callable[[Any], None], subject: Any = None) -> None:  # noqa: ANN401
        """Call ``act(subject)`` at ``when_s`` or, if that has passed, as soon as possible."""
        ...


class TurnServer(Protocol):
    """Serves one turn: fills its record and then calls ``done``, exactly once."""

    def serve(self, dialogue: Dialogue, record: TurnRecord, done: Done) -> None: ...


class Driver:
    """Open loop by arrivals or, with ``users``, closed loop.

    Closed loop: ``users`` conversations run at a time, in the order of ``arrivals``, whose
    instants are not used; each begins when one before it has ended.
    """

    def __init__(
        self,
        timeline: Timeline,
        server: TurnServer,
        play: Play,
        *,
        warm_up: bool = False,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeline = timeline
        self._server = server
        self._play = play
        self._warm_up = warm_up
        self._on_idle = on_idle
        self._queue: deque[Conversation] = deque()
        self._active = 0

    def start(self, arrivals: Sequence[Arrival], users: int | None = None) -> None:
        """Schedule everything; ``on_idle`` is called when the last conversation has ended."""
        if not arrivals:
            self._on_idle()
        elif users is None:
            self._active = len(arrivals)
            for arrival in arrivals:
                self._timeline.at(arrival.at_s, self._begin, arrival)
        else:
            self._active = len(arrivals)
            self._queue.extend(arrival.conversation for arrival in arrivals)
            for _ in range(min(users, len(arrivals))):
                self._begin_next(0.0)

    def _begin(self, arrival: Arrival) -> None:
        dialogue = self._play.begin(arrival.conversation, arrival.at_s)
        dialogue.warm_up = self._warm_up
        self._send(dialogue)

    def _begin_next(self, at_s: float) -> None:
        arrival = Arrival(at_s, self._queue.popleft())
        self._timeline.at(at_s, self._begin, arrival)

    def _send(self, dialogue: Dialogue) -> None:
        record = self._play.send(dialogue, self._timeline.now_s)
        self._server.serve(dialogue, record, self._ended)

    def _ended(self, dialogue: Dialogue, record: TurnRecord) -> None:
        next_at_s = self._play.close(dialogue, record)
        if next_at_s is not None:
            self._timeline.at(next_at_s, self._send, dialogue)
            return
        self._active -= 1
        if self._queue:
            self._begin_next(self._timeline.now_s)
        if self._active == 0:
            self._on_idle()
