"""What ``ppd doctor`` looks at. Each check runs the real thing for a moment."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ppdbench.core.errors import PpdError

WAKE_UPS = 200
WAKE_EVERY_S = 0.002
WAKE_LIMIT_S = 0.010
FILES_WANTED = 4096


@dataclass(frozen=True, slots=True)
class Check:
    """``ok`` is ``None`` for something optional that is not there. ``said`` is one sentence."""

    name: str
    ok: bool | None
    said: str


def run_checks() -> Iterator[Check]:
    """All checks; none raises."""
    yield Check("cores", None if (os.cpu_count() or 1) < 2 else True, _cores())
    yield _open_files()
    yield _guarded("timers", _timers)
    yield _guarded("conversation", _conversation)
    yield _optional("simulator costs", _costs)
    yield _optional("CPU engine", _engine)


def _guarded(name: str, look: Callable[[], tuple[bool, str]]) -> Check:
    try:
        return Check(name, *look())
    except PpdError as error:
        return Check(name, ok=False, said=str(error))


def _optional(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, ok=True, said=look())
    except (PpdError, ImportError) as error:
        return Check(name, ok=None, said=str(error))


def _cores() -> str:
    usable = len(os.sched_getaffinity(0))
    return f"{usable} usable; a client and an engine want one each"


def _open_files() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    advice = "" if enough else f"; wanted {FILES_WANTED}, raise it with ulimit -Hn"
    return Check("open files", enough, f"at most {hard} connections{advice}")


def _timers() -> tuple[bool, str]:
    p99_s = asyncio.run(_wake_lag_p99_s())
    return p99_s <= WAKE_LIMIT_S, f"wake up {p99_s * 1e3:.2f} ms late at the 99th percentile"


async def _wake_lag_p99_s() -> float:
    from ppdbench.load.clock import WallClock

    clock = WallClock()
    lags: list[float] = []
    woken = asyncio.Event()

    def wake(due_s: float) -> None:
        lags.append(clock.now_s - due_s)
        if len(lags) == WAKE_UPS:
            woken.set()

    for i in range(1, WAKE_UPS + 1):
        clock.at(i * WAKE_EVERY_S, wake, i * WAKE_EVERY_S)
    await woken.wait()
    clock.close()
    return sorted(lags)[int(0.99 * WAKE_UPS)]


def _conversation() -> tuple[bool, str]:
    """Three turns through the real driver and a real process."""
    from ppdbench.core.conversation import Turn
    from ppdbench.load.selftest import converse, instant_engine

    with instant_engine() as url:
        records = asyncio.run(converse(url, (Turn(8, 4), Turn(8, 4), Turn(8, 4))))
    good = [record for record in records if record.ok and len(record.token_at_s) == 4]
    return len(good) == 3, f"{len(good)} of 3 turns measured against an instant engine"


def _costs() -> str:
    from ppdbench.sim.config import SimConfig
    from ppdbench.sim.prepare import cost_source, costs_for

    config = SimConfig()
    costs_for(config)
    return f"{config.model} on {config.gpu} from {cost_source(config)}"


def _engine() -> str:
    from ppdbench.cluster.engine import engine_version, find_python
    from ppdbench.cluster.vllm_args import Device

    python = find_python(None, Device.CPU)
    return f"vLLM {engine_version(python)[0]} at {python}"
