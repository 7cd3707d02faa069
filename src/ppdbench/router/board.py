"""Numbers that all workers see: each adds in its own row of shared memory, so nobody locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from mmap import mmap

_VALUE_BYTES = 8
_MOST = 2.0**53
RATE_WINDOW_S = 60


class Tally:
    """One value on the board with its places found: for what is counted on every turn."""

    __slots__ = ("_all", "_alone", "_mine", "_values")

    def __init__(self, values: memoryview[float], mine: int, everyone: range) -> None:
        self._values = values
        self._mine = mine
        self._all = everyone
        self._alone = len(everyone) == 1

    def add(self, amount: float = 1.0) -> None:
        self._values[self._mine] += amount

    def total(self) -> float:
        values = self._values
        if self._alone:
            return values[self._mine]
        return sum(values[at] for at in self._all)


class Histogram:
    """Counts per bucket and the sum, on the board with their places found.

    The sum's place follows those of the buckets, of which there is one more than ``bounds``.
    """

    __slots__ = ("_at", "_bounds", "_values")

    def __init__(self, values: memoryview[float], at: int, bounds: Sequence[float]) -> None:
        self._values = values
        self._at = at
        self._bounds = bounds

    def observe(self, value: float) -> None:
        values, bounds, at = self._values, self._bounds, self._at
        values[at + bisect_left(bounds, value)] += 1.0
        values[at + len(bounds) + 1] += value


class Common:
    """One value of the row that is everybody's, with its place found; the last writer wins."""

    __slots__ = ("_at", "_values")

    def __init__(self, values: memoryview[float], at: int) -> None:
        self._values = values
        self._at = at

    def get(self) -> float:
        return self._values[self._at]

    def put(self, value: float) -> None:
        self._values[self._at] = value


class Board:
    """One row of named float64 values per worker in ``buffer[offset:]``, and one shared row.

    ``add`` and ``put`` write this worker's row; ``total`` sums the rows.
    """

    def __init__(
        self, buffer: mmap, offset: int, names: Sequence[str], workers: int, worker: int
    ) -> None:
        count = len(names)
        size = Board.bytes_for(names, workers)
        self._values = memoryview(buffer)[offset : offset + size].cast("d")
        self._index = {name: at for at, name in enumerate(names)}
        self._stride = count
        self._base = count * worker
        self._shared = count * workers
        self._rows = range(workers)

    def __repr__(self) -> str:
        busy = {name: self.total(name) for name in self._index if self.total(name)}
        return f"<Board {busy}>"

    @staticmethod
    def bytes_for(names: Sequence[str], workers: int) -> int:
        return len(names) * (workers + 1) * _VALUE_BYTES

    def tally(self, name: str) -> Tally:
        """``name`` for frequent use."""
        at = self._index[name]
        return Tally(self._values, self._base + at, range(at, self._shared, self._stride))

    def histogram(self, first: str, bounds: Sequence[float]) -> Histogram:
        """The one whose first bucket is ``first``, for frequent use."""
        return Histogram(self._values, self._base + self._index[first], bounds)

    def common(self, name: str) -> Common:
        """``name`` in everybody's row."""
        return Common(self._values, self._shared + self._index[name])

    def add(self, name: str, amount: float = 1.0) -> None:
        self._values[self._base + self._index[name]] += amount

    def put(self, name: str, value: float) -> None:
        self._values[self._base + self._index[name]] = value

    def mine(self, name: str) -> float:
        return self._values[self._base + self._index[name]]

    def total(self, name: str) -> float:
        at = self._index[name]
        values, stride = self._values, self._stride
        return sum(values[at + row * stride] for row in self._rows)

    def recent(self, stamp: str, name: str, after: float) -> float:
        """The sum of ``name`` over the rows whose ``stamp`` is later than ``after``."""
        at, stamped, stride = self._index[name], self._index[stamp], self._stride
        values = self._values
        return sum(
            values[at + row * stride]
            for row in self._rows
            if values[stamped + row * stride] > after
        )

    def clear(self, names: Sequence[str]) -> None:
        """Set gauges of this row to zero, as after a worker's death."""
        for name in names:
            self.put(name, 0.0)

    def sound(self) -> bool:
        """Whether all rows hold what somebody may have written: times and counts."""
        return all(0 <= value < _MOST for value in self._values)

    def close(self) -> None:
        """Give the buffer back; the board is of no use afterwards."""
        self._values.release()


class ArrivalRate:
    """Conversation arrivals per second over the last :data:`RATE_WINDOW_S`, all workers together.

    Younger than the window, the rate is over the time since the first arrival, at least 1 s.
    """

    NAMES = (
        "arrivals_first_s",
        *(f"arrivals_at_{i}" for i in range(RATE_WINDOW_S)),
        *(f"arrivals_in_{i}" for i in range(RATE_WINDOW_S)),
    )

    def __init__(self, board: Board) -> None:
        self._board = board
        self._first_s = board.common("arrivals_first_s")
        self._second = -1
        self._rate = 0.0

    @classmethod
    def forget(cls, board: Board) -> None:
        """Begin anew in this row."""
        board.clear(cls.NAMES)
        board.common("arrivals_first_s").put(0.0)

    def count(self, now_s: float) -> None:
        """A conversation arrived."""
        second = int(now_s)
        board, cell = self._board, second % RATE_WINDOW_S
        if self._first_s.get() == 0.0:
            self._first_s.put(now_s)
        if board.mine(f"arrivals_at_{cell}") != second:
            board.put(f"arrivals_at_{cell}", second)
            board.put(f"arrivals_in_{cell}", 0.0)
        board.add(f"arrivals_in_{cell}")

    def per_s(self, now_s: float) -> float:
        """Reads the rows at most once per second."""
        second = int(now_s)
        if second != self._second:
            self._second = second
            self._rate = self._measure(now_s)
        return self._rate

    def _measure(self, now_s: float) -> float:
        first_s = self._first_s.get()
        if first_s == 0.0:
            return 0.0
        arrivals = sum(self._recent(cell, int(now_s)) for cell in range(RATE_WINDOW_S))
        # The second that runs has a cell too, so the others reach back that much less.
        return arrivals / min(max(now_s - first_s, 1.0), RATE_WINDOW_S - 1 + now_s % 1)

    def _recent(self, cell: int, second: int) -> float:
        return self._board.recent(
            f"arrivals_at_{cell}", f"arrivals_in_{cell}", second - RATE_WINDOW_S
        )
