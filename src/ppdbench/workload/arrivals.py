"""When conversations begin: a list that is fixed by the seed before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ppdbench.core.errors import WorkloadError

Floats = npt.NDArray[np.float64]

PROCESSES = ("poisson", "constant", "gamma", "trace", "closed")


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """How conversations arrive.

    ``cv`` is the gaps' coefficient of variation under ``gamma`` (1 is Poisson; vLLM's burstiness
    is 1/cv²). ``times_s`` are a trace's instants. ``closed`` has users instead of a rate: each
    begins its next conversation when the one before has ended, ``conversations_per_user`` in all.
    """

    process: str = "poisson"
    cv: float = 1.0
    times_s: tuple[float, ...] = ()
    conversations_per_user: int = 0

    @property
    def is_closed(self) -> bool:
        return self.process == "closed"


def gaps(process: ArrivalProcess, rate_per_s: float, n: int, rng: np.random.Generator) -> Floats:
    """``n`` times between arrivals, mean 1/rate."""
    if process.process == "poisson":
        return rng.standard_exponential(n) / rate_per_s
    if process.process == "gamma":
        shape = process.cv**-2
        return rng.standard_gamma(shape, n) / (shape * rate_per_s)
    if process.process == "constant":
        return np.full(n, 1.0 / rate_per_s)
    raise ValueError(f"{process.process} arrivals have no gaps to draw")


def arrival_times(
    process: ArrivalProcess, rate_per_s: float, duration_s: float, rng: np.random.Generator
) -> Floats:
    """Rising instants in [0, ``duration_s``), at least one.

    A draw without any arrival is drawn again: a point must have a conversation. Constant arrivals
    begin at 0; the random processes begin with a gap. Under ``closed``, where ``rate_per_s`` is
    the number of users, all stand at 0 and the driver begins them as users become free.
    """
    if process.is_closed:
        return np.zeros(int(rate_per_s) * process.conversations_per_user)
    if process.process == "trace":
        times = np.asarray(process.times_s)
        return times[times < duration_s]
    if process.process == "constant":
        return np.arange(max(1, math.ceil(duration_s * rate_per_s - 1e-9))) / rate_per_s
    while True:
        times = _random_times(process, rate_per_s, duration_s, rng)
        if times.size:
            return times


def expected_arrivals(process: ArrivalProcess, rate_per_s: float, duration_s: float) -> float:
    """How many conversations a point has, on average; exact for all but the random processes."""
    if process.process in ("closed", "trace", "constant"):
        return float(arrival_times(process, rate_per_s, duration_s, np.random.default_rng(0)).size)
    return rate_per_s * duration_s


def _random_times(
    process: ArrivalProcess, rate_per_s: float, duration_s: float, rng: np.random.Generator
) -> Floats:
    expected = rate_per_s * duration_s
    block = int(expected + 4 * process.cv * math.sqrt(expected)) + 8
    times = np.cumsum(gaps(process, rate_per_s, block, rng))
    while times[-1] < duration_s:
        more = times[-1] + np.cumsum(gaps(process, rate_per_s, block, rng))
        times = np.concatenate([times, more])
    return times[times < duration_s]


def read_trace(path: Path) -> tuple[float, ...]:
    """Seconds, one per line, rising; blank lines and ``#`` comments are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"arrival trace {str(path)!r} cannot be read ({error}); "
            "expected text, one time in seconds per line"
        ) from error
    times = [
        _instant(path, number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not times or any(later < earlier for earlier, later in pairwise(times)):
        raise WorkloadError(
            f"arrival trace {str(path)!r}: expected at least one time, none before the one above "
            "it; sort the file"
        )
    return tuple(times)


def _instant(path: Path, number: int, line: str) -> float:
    try:
        instant = float(line)
    except ValueError as error:
        raise WorkloadError(
            f"arrival trace {str(path)!r}, line {number}: {line.strip()!r} is not a number; "
            "expected seconds from the start"
        ) from error
    if not 0 <= instant < math.inf:
        raise WorkloadError(
            f"arrival trace {str(path)!r}, line {number}: {instant} is not a time from 0 on"
        )
    return instant
