"""A live point over several processes, where one loop could not keep the schedule.

Conversations are split by home, so that each process sees every request of its homes and the
policies that ask for a node's running requests stay exact. Only the choice of the least loaded P
is by what the process itself has sent there. All start on one instant of the machine's clock.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from ppdbench.core.conversation import Arrival
from ppdbench.core.errors import EngineError, PpdError
from ppdbench.load.lifetime import die_with
from ppdbench.load.offered import offered_by
from ppdbench.load.share import START_AHEAD_S, Done, Share, Task

REQUESTS_PER_S = 4_000
CHUNKS_PER_S = 60_000
"""What one process is trusted with; ``ppd doctor --load`` measures more on a quiet core."""


def processes_for(arrivals: Sequence[Arrival], users: int | None) -> int:
    """How many processes the offered load needs. A closed loop holds itself back: one."""
    if users is not None:
        return 1
    offered = offered_by(arrivals)
    needed = max(offered.turns_per_s / REQUESTS_PER_S, offered.tokens_per_s / CHUNKS_PER_S)
    return max(1, min(math.ceil(needed), len(os.sched_getaffinity(0))))


def split(task: Task, processes: int) -> list[Task]:
    """``task`` in parts that place every conversation where the whole would have."""
    groups = [_workers_of(h, len(task.homes), processes) for h in range(len(task.homes))]
    shares: list[list[Arrival]] = [[] for _ in range(processes)]
    for i, arrival in enumerate(sorted(task.arrivals, key=lambda a: a.at_s)):
        turn, home = divmod(i, len(task.homes))
        group = groups[home]
        shares[group[turn % len(group)]].append(arrival)
    parts = []
    for worker, arrivals in enumerate(shares):
        homes = tuple(h for h, group in zip(task.homes, groups, strict=True) if worker in group)
        parts.append(replace(task, homes=homes, arrivals=arrivals))
    return [part for part in parts if part.arrivals]


def _workers_of(home: int, homes: int, processes: int) -> list[int]:
    if processes <= homes:
        return [home % processes]
    return [worker for worker in range(processes) if worker % homes == home]


async def run_split(parts: Sequence[Task]) -> list[Done]:
    """Run every part in a process of its own.

    Raises:
        EngineError: a process died.
        PpdError: what a part raised.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    workers = []
    try:
        for part in parts:
            ours, theirs = spawn.Pipe()
            worker = spawn.Process(target=_work, args=(theirs, part, os.getpid()), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        await asyncio.gather(*(_hear(pipe) for pipe in pipes))
        start_s = time.monotonic() + START_AHEAD_S
        for pipe in pipes:
            pipe.send(start_s)
        return [done for done in await asyncio.gather(*map(_hear, pipes)) if done is not None]
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


async def _hear(pipe: Connection) -> Done | None:
    try:
        answer: Done | PpdError | None = await asyncio.to_thread(pipe.recv)
    except EOFError:
        raise EngineError("a load process died; is the machine out of memory?") from None
    if isinstance(answer, PpdError):
        raise answer
    return answer


def _work(pipe: Connection, part: Task, parent: int) -> None:
    """A load process's life: connect, wait for the common start, run, tell."""
    import uvloop

    die_with(parent)
    try:
        pipe.send(uvloop.run(_serve(pipe, part)))
    except PpdError as error:
        pipe.send(error)


async def _serve(pipe: Connection, part: Task) -> Done:
    share = Share(part)
    try:
        await share.connect()
        pipe.send(None)
        return await share.run(await asyncio.to_thread(pipe.recv))
    finally:
        await share.close()
