"""From a point's outcome to what is stored of it: the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppdbench.core.conversation import Arrival
from ppdbench.experiments.grid import Grid
from ppdbench.runs.aggregate import Limits, Plan, aggregate, failed_point
from ppdbench.runs.points import PointKey, PointOutcome
from ppdbench.runs.recording import records_as_parquet
from ppdbench.runs.store import point_line


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished point, ready to be stored: its line, its records (folder → Parquet), its clock.

    ``ttft_s`` and ``tpot_s`` are its medians over all turns, for whoever watches.
    """

    key: PointKey
    line: bytes
    validity: tuple[str, ...]
    turns: int
    timing: Mapping[str, Any]
    records: Mapping[str, bytes] = field(default_factory=dict)
    ttft_s: float | None = None
    tpot_s: float | None = None


class Measuring:
    """A grid as one sweep measures it. Picklable; remembers only the latest schedule."""

    def __init__(
        self,
        grid: Grid,
        seed: int,
        *,
        limits: Limits | None = None,
        keep_records: bool = False,
        block_tokens: int | None = None,
    ) -> None:
        self.grid, self.seed = grid, seed
        self.limits = limits or Limits()
        self._keep_records = keep_records
        self._block_tokens = block_tokens
        self._latest: tuple[int, Sequence[Arrival]] | None = None

    def __repr__(self) -> str:
        return f"<Measuring {self.grid.name} seed {self.seed}>"

    def seed_of(self, key: PointKey) -> int:
        return key.seed(self.seed)

    def arrivals(self, key: PointKey) -> Sequence[Arrival]:
        """Points that differ only in topology and policy share one schedule, made once."""
        seed = self.seed_of(key)
        if self._latest is None or self._latest[0] != seed:
            self._latest = (seed, self.grid.schedule(key, self.seed))
        return self._latest[1]

    def finish(
        self,
        key: PointKey,
        outcome: PointOutcome,
        block_tokens: int | None = None,
        spoken: Sequence[Arrival] | None = None,
    ) -> Measured:
        """``block_tokens`` is what the engine says of itself, ``spoken`` what it really got."""
        plan = Plan.of(spoken or self.arrivals(key), block_tokens or self._block_tokens)
        point = aggregate(key, self.seed_of(key), outcome, plan, self.limits)
        records = records_as_parquet(outcome.records) if self._keep_records else {}
        return _measured(key, point, outcome.timing, records)

    def fail(self, key: PointKey, cause: str, timing: Mapping[str, Any]) -> Measured:
        """A point that could not be measured is recorded with its cause, too."""
        plan = Plan.of(self.arrivals(key), self._block_tokens)
        point = failed_point(key, self.seed_of(key), cause, plan)
        return _measured(key, point, timing, {})


def _measured(
    key: PointKey,
    point: Mapping[str, Any],
    timing: Mapping[str, Any],
    records: Mapping[str, bytes],
) -> Measured:
    return Measured(
        key=key,
        line=point_line(point),
        validity=tuple(point["validity"]),
        turns=sum(point["routes"].values()),
        timing={"point": key.slug, **timing},
        records=records,
        ttft_s=point["all"]["ttft_s"]["p50"],
        tpot_s=point["all"]["tpot_s"]["p50"],
    )
