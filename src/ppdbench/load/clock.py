"""The wall clock as a timeline: fine timers for asyncio loops that only know milliseconds.

uvloop and the standard loop both round timers to milliseconds, which would put up to a
millisecond on every latency that is counted from a schedule. A Linux timer descriptor
(``timerfd_create(2)``) on the same clock as ``time.monotonic`` wakes the loop within some ten
microseconds and costs nothing while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from typing import Any

from ppdbench.core.errors import EngineError

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class TimerDescriptor:
    """One kernel timer that becomes readable at an instant of ``time.monotonic``."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fileno = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC))
        if self.fileno < 0:
            raise EngineError(
                f"no kernel timer: {os.strerror(ctypes.get_errno())}; "
                "raise the limit of open files (ulimit -n)"
            )

    def arm(self, at_monotonic_s: float) -> None:
        """Fire at that instant; one in the past fires at once."""
        nanoseconds = max(1, int(at_monotonic_s * 1e9))
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 1_000_000_000)))
        self._libc.timerfd_settime(self.fileno, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def acknowledge(self) -> None:
        """Make it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fileno, 8)

    def close(self) -> None:
        os.close(self.fileno)


class WallClock:
    """Seconds since ``start``; calls never come early. Needs a running loop.

    What a call raises goes to ``on_error``, so that whoever waits for the end hears of it.

    Calls of one instant come first in, first out.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = TimerDescriptor()
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0
        self._armed_s = float("inf")
        self.start_s = time.monotonic()
        self.on_error: Callable[[Exception], None] | None = None
        self._loop.add_reader(self._timer.fileno, self._fire)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    def at(self, when_s: float, act: Callable[[Any], None], subject: Any = None) -> None:  # noqa: ANN401
        self._order += 1
        heapq.heappush(self._heap, (when_s, self._order, act, subject))
        if when_s < self._armed_s:
            self._arm()

    def restart(self, start_monotonic_s: float | None = None) -> None:
        """Make that instant, or this one, 0 and drop what is scheduled."""
        self._heap.clear()
        self._armed_s = float("inf")
        self.start_s = time.monotonic() if start_monotonic_s is None else start_monotonic_s

    def close(self) -> None:
        """Drop what is scheduled."""
        self._heap.clear()
        self._loop.remove_reader(self._timer.fileno)
        self._timer.close()

    def _arm(self) -> None:
        self._armed_s = self._heap[0][0]
        self._timer.arm(self.start_s + self._armed_s)

    def _fire(self) -> None:
        self._timer.acknowledge()
        self._armed_s = float("-inf")  # below any instant, so that calls made now do not arm
        try:
            self._run_due()
        except Exception as error:
            if self.on_error is None:
                raise
            self.on_error(error)
        finally:
            self._armed_s = float("inf")
            if self._heap:
                self._arm()

    def _run_due(self) -> None:
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, act, subject = heapq.heappop(self._heap)
            act(subject)
