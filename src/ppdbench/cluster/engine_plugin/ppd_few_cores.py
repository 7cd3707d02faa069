"""A vLLM plugin for CPU nodes, which share few cores: its waiting threads sleep, not spin.

Runs inside the engine, in the engine's Python; vLLM finds it by its entry point on PYTHONPATH.
Unchanged, an idle node keeps a core busy: NIXL's progress thread polls without a pause, and a
worker yields in a loop for a second after each step. Where nodes share cores these threads hold
up each other's wake-ups, and a hand-off of 0.05 s takes seconds or outlives its lease.

While two nodes connect, both still spin. On one core each message of theirs then costs a time
slice, so NIXL's threads do not share their worker's binding to a core.
"""

import functools
import os
import time
from collections.abc import Callable

NIXL_PAUSE_US = 1000
"""Between two looks of NIXL's progress thread; an event still wakes it at once."""
STEP_PAUSE_S = 0.0001
"""Between two looks of a worker for its next step."""


def register() -> None:
    """Called by vLLM in each of its processes, more than once."""
    _pause_between_steps()
    try:
        from nixl import _api as api
        from nixl import _bindings as bindings
    except ImportError:
        return
    if not hasattr(bindings.nixlAgentConfig, "pauses"):
        bindings.nixlAgentConfig = _pausing(bindings.nixlAgentConfig)
        api.nixl_agent.__init__ = _on_any_core(api.nixl_agent.__init__)


def _pause_between_steps() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(STEP_PAUSE_S)


def _pausing(config: type) -> type:
    class PausingConfig(config):  # type: ignore[misc]
        pauses = True

        def __setattr__(self, name: str, value: object) -> None:
            paused = name == "pthrDelay" and not value
            super().__setattr__(name, NIXL_PAUSE_US if paused else value)

    return PausingConfig


def _on_any_core(make: Callable[..., None]) -> Callable[..., None]:
    """A thread keeps the affinity of its starter; the parent process has the whole node's."""

    @functools.wraps(make)
    def unbound(*args: object, **options: object) -> None:
        bound = os.sched_getaffinity(0)
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        try:
            make(*args, **options)
        finally:
            os.sched_setaffinity(0, bound)

    return unbound
