"""What one process does of a live point: its conversations, on its loop and its clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.core.conversation import Arrival
from ppdbench.core.topology import NodeSpec
from ppdbench.load.clock import WallClock
from ppdbench.load.conversation import Play
from ppdbench.load.driver import Driver
from ppdbench.load.offered import offered_by
from ppdbench.load.turns import HttpTurns, TurnSettings
from ppdbench.policy.base import Policy
from ppdbench.runs.records import TurnRecord

BEAT_S = 0.01
WATCH_EVERY_BEATS = 25
CONNECTIONS_WARM = range(8, 1025)
"""At least and at most so many connections to each node are open when a point begins."""

HICCUP_S = 0.05
"""The pause of this process whose piled-up turns find open connections. Making one takes several
times as long as sending a turn, so that without them a short pause would become a long one."""

START_AHEAD_S = 0.1
"""The clock begins this long after the call: scheduling some thousand arrivals takes time too."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One process's part of a point. Picklable. ``homes`` are those that its turns live on."""

    cluster: ClusterSpec
    policy: Policy
    rate_per_s: float
    turns: TurnSettings
    salt: str
    seed: int
    homes: tuple[NodeSpec, ...]
    arrivals: Sequence[Arrival] = ()
    users: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a task. Lags are how late turns were sent and the loop woke."""

    records: list[TurnRecord]
    send_lag_p99_s: float | None
    loop_lag_p99_s: float | None
    wall_s: float


class Share:
    """A task under way. Needs a running loop; ``close`` it."""

    def __init__(self, task: Task, on_progress: Progress | None = None) -> None:
        self.clock = WallClock()
        self._task = task
        self._on_progress = on_progress
        self._turns = HttpTurns(
            task.cluster, self.clock, task.turns, salt=task.salt, seed=task.seed
        )
        self._play = Play(
            task.cluster.topology,
            task.policy,
            task.rate_per_s,
            running=self._turns.running,
            outstanding=self._turns.outstanding,
            homes=task.homes,
        )
        self._loop_lags_s: list[float] = []

    @property
    def records(self) -> list[TurnRecord]:
        """Of what was offered so far, warm-up included."""
        return self._play.records

    async def connect(self) -> None:
        """Open connections, so that the first turns pay for none."""
        await self._turns.warm(connections_for(self._task))

    async def warm_up(self, arrivals: Sequence[Arrival]) -> None:
        """Conversations that are recorded as warm-up."""
        await self._offer(arrivals, warm_up=True)

    async def run(self, start_monotonic_s: float | None = None) -> Done:
        """Offer the task's arrivals and wait for the last answer.

        The point's clock starts at ``start_monotonic_s``, or soon.
        """
        if start_monotonic_s is None:
            start_monotonic_s = time.monotonic() + START_AHEAD_S
        self.clock.restart(start_monotonic_s)
        self._turns.send_lags_s.clear()
        self._loop_lags_s.clear()
        await self._offer(self._task.arrivals, warm_up=False)
        return Done(
            self._play.records,
            _p99(self._turns.send_lags_s),
            _p99(self._loop_lags_s),
            self.clock.now_s,
        )

    async def close(self) -> None:
        """Cancel at the engines what is still out."""
        await self._turns.close()
        self.clock.close()

    async def _offer(self, arrivals: Sequence[Arrival], *, warm_up: bool) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.clock.on_error = lambda error: _settle(ended, error)
        driver = Driver(
            self.clock, self._turns, self._play, warm_up=warm_up, on_idle=lambda: _settle(ended)
        )
        driver.start(arrivals, self._task.users)
        beats = asyncio.get_running_loop().create_task(self._beat())
        try:
            await ended
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        """Sample how late this loop runs, look after deadlines, tell progress."""
        beats = 0
        while True:
            due_s = self.clock.now_s + BEAT_S
            woken = asyncio.Event()
            self.clock.at(due_s, lambda event: event.set(), woken)
            await woken.wait()
            self._loop_lags_s.append(self.clock.now_s - due_s)
            beats += 1
            if beats % WATCH_EVERY_BEATS == 0:
                self._turns.watch()
                if self._on_progress is not None:
                    self._on_progress(len(self._play.records), self._turns.turns_out)


def connections_for(task: Task) -> int:
    """As many as the turns of one hiccup need, or the users of a closed loop.

    No more than there are conversations, as each has one turn out; all where they arrive at once.
    """
    hiccup = math.ceil(offered_by(task.arrivals).turns_per_s * HICCUP_S)
    most = min(len(task.arrivals), CONNECTIONS_WARM.stop - 1)
    return max(CONNECTIONS_WARM.start, min(task.users or hiccup or most, most))


def _settle(ended: asyncio.Future[None], error: Exception | None = None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
