"""A vLLM plugin for CPU nodes, which share few cores: its waiting threads sleep, not spin.

Runs inside the engine, in the engine's Python; vLLM finds it by its entry point on PYTHONPATH.
Unchanged, an idle node keeps a core busy: NIXL's progress thread polls without a pause, and a
worker yields in a loop for a second after each step. Where nodes share cores these threads hold
up each other's wake-ups, and a hand-off of 0.05 s takes seconds or outlives its lease.
"""

import time

NIXL_PAUSE_US = 1000
"""Between two looks of NIXL's progress thread; an event still wakes it at once."""
STEP_PAUSE_S = 0.0001
"""Between two looks of a worker for its next step."""


def register() -> None:
    """Called by vLLM in each of its processes, more than once."""
    _pause_between_steps()
    _pause_nixl()


def _pause_between_steps() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(STEP_PAUSE_S)


def _pause_nixl() -> None:
    try:
        from nixl import _bindings as bindings
    except ImportError:
        return
    original = bindings.nixlAgentConfig
    if not hasattr(original, "pthrDelay") or hasattr(original, "pauses"):
        return

    class PausingConfig(original):  # type: ignore[misc, valid-type]
        pauses = True

        def __setattr__(self, name: str, value: object) -> None:
            paused = name == "pthrDelay" and not value
            super().__setattr__(name, NIXL_PAUSE_US if paused else value)

    bindings.nixlAgentConfig = PausingConfig
