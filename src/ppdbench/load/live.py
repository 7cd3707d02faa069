"""One point on a real cluster, on the wall clock."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.core.conversation import Arrival
from ppdbench.http.files import raise_file_limit
from ppdbench.load.proving import path_facts, read, read_settled
from ppdbench.load.share import Done, Progress, Share, Task
from ppdbench.load.split import processes_for, run_split, split
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.base import Policy
from ppdbench.runs.points import PointOutcome
from ppdbench.runs.records import TurnRecord


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How a live point is run.

    ``users`` makes it a closed loop of that many conversations at a time. ``warm_up`` runs to its
    end before the clock of the point starts; its records are marked. ``processes`` is the number
    of load processes, ``None`` for as many as the offered load needs. ``on_progress`` gets the
    number of turns sent and of turns out, now and then, of a point in one process.
    """

    turns: TurnSettings
    users: int | None = None
    warm_up: Sequence[Arrival] = ()
    processes: int | None = None
    on_progress: Progress | None = field(default=None, compare=False)


async def run_live_point(  # noqa: PLR0913, PLR0917  (a point is these things)
    cluster: ClusterSpec,
    policy: Policy,
    arrivals: Sequence[Arrival],
    rate_per_s: float,
    settings: LiveSettings,
    seed: int,
) -> PointOutcome:
    """Offer ``arrivals`` and wait for the last answer.

    Caches are cold for the point: a salt that nobody used before goes into every request. The
    same ``seed`` sends the same prompts. Call it inside ``asyncio.timeout`` to bound it; then the
    turns that are out are cancelled at the engines.
    """
    raise_file_limit()
    task = Task(
        cluster,
        policy,
        rate_per_s,
        settings.turns,
        salt=f"{seed}-{secrets.token_hex(8)}",
        seed=seed,
        homes=cluster.topology.homes,
        arrivals=arrivals,
        users=settings.users,
    )
    share = Share(task, settings.on_progress)
    try:
        with _no_collection():
            return await _measure(share, task, settings)
    finally:
        await share.close()


async def _measure(share: Share, task: Task, settings: LiveSettings) -> PointOutcome:
    await share.warm_up(settings.warm_up)
    before = await (read_settled if settings.warm_up else read)(task.cluster)
    processes = _processes(task, settings)
    if processes == 1:
        await share.connect()
        done = [await share.run()]
        records = done[0].records
    else:
        done = await run_split(split(task, processes))
        measured = [record for part in done for record in part.records]
        records = share.records + sorted(measured, key=lambda record: record.sent_at_s)
    facts = _facts(task.arrivals, records, done)
    facts |= await path_facts(task.cluster, before, records)
    timing = {"wall_s": max(part.wall_s for part in done), "load_processes": processes}
    return PointOutcome(records, facts, timing)


def _processes(task: Task, settings: LiveSettings) -> int:
    """A limit on hand-offs is per P, and only one process can count all that are out there."""
    if settings.turns.max_hand_offs is not None:
        return 1
    return settings.processes or processes_for(task.arrivals, task.users)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for cycles during a point: records grow by the million and hold none.

    A full collection stops the loop for a tenth of a second at some hundred thousand records.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _facts(
    arrivals: Sequence[Arrival], records: Sequence[TurnRecord], done: Sequence[Done]
) -> dict[str, Any]:
    """The worst process speaks for the client."""
    instants = [arrival.at_s for arrival in arrivals]
    recomputed = [
        r.recomputed_tokens for r in records if not r.warm_up and r.recomputed_tokens is not None
    ]
    return {
        "send_lag_p99_s": _worst(part.send_lag_p99_s for part in done),
        "loop_lag_p99_s": _worst(part.loop_lag_p99_s for part in done),
        "recomputed_tokens": sum(recomputed) if recomputed else None,
        "window_s": max(instants) - min(instants) if instants else 0.0,
    }


def _worst(lags: Iterator[float | None]) -> float | None:
    return max((lag for lag in lags if lag is not None), default=None)
