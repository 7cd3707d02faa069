"""What a point is called and what running it yields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppdbench.core.seeds import seed_for
from ppdbench.runs.records import TurnRecord


@dataclass(frozen=True, slots=True)
class PointKey:
    """One (topology, policy, workload, rate, repeat) of a sweep."""

    topology: str
    policy: str
    workload: str
    rate_per_s: float
    repeat: int = 0

    @property
    def slug(self) -> str:
        """A file name; unique within a run."""
        policy = self.policy.replace(":", "-").replace("/", "-")
        return f"{self.topology}.{policy}.{self.workload}.{self.rate_per_s:g}.{self.repeat}"

    def seed(self, root: int) -> int:
        """Without topology and policy: compared routes get the same conversations and arrivals."""
        return seed_for(root, self.workload, self.rate_per_s, self.repeat)


@dataclass(slots=True)
class PointOutcome:
    """What a backend measured at one point, before aggregation.

    ``facts`` holds what the records cannot show: ``send_lag_p99_s``, ``loop_lag_p99_s``,
    ``path_proven`` (bool or ``None`` where nothing can prove it), ``bytes_moved``,
    ``recomputed_tokens``, ``window_s`` (first to last arrival). Unknown is ``None``, never 0.
    ``timing`` goes to ``timing.jsonl`` alone: wall time, pids, ports.
    """

    records: list[TurnRecord]
    facts: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
