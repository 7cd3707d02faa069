"""From raw figures and a rule to a verdict. Pure; every number of a verdict is derived here.

The score is the paper's: S = w_ttft·Δ_ttft − w_tpot·Δ_tpot, with Δ_ttft = (TTFT₀ − TTFT₁)/TTFT₀
the relative gain of local and Δ_tpot = (TPOT₁ − TPOT₀)/TPOT₀ its relative cost; index 0 is remote,
1 is local, and a delta is 0 where its denominator is not positive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

import numpy as np

from ppdbench.core.errors import UsageError

Stats = Mapping[str, float | None]
"""One quantity's statistics by name; ``None`` where nobody measured it."""

LARGEST_WEIGHT = 1e9
"""Weights matter by their ratio alone; this keeps every S a finite number."""

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
CONFIDENCE = 0.95
REPLICATE_UNIT = 1e-4
"""Bootstrap replicates are kept as whole multiples of this, so a table stays small."""


class Choice(StrEnum):
    """What a cell says. UNDECIDED cells take the rule's default."""

    REMOTE = "remote"
    LOCAL = "local"
    UNDECIDED = "undecided"


class Status(StrEnum):
    """How a cell came to its decision."""

    MEASURED = "measured"
    ONE_SIDED = "one_sided"
    FAILED = "failed"
    INTERPOLATED = "interpolated"


@dataclass(frozen=True, slots=True)
class Guard:
    """Vetoes local where TPOT of all turns, co-located ones included, suffers too much.

    ``limit_s`` bounds the local side in seconds; ``limit_ratio`` bounds local over remote.
    """

    stat: str
    limit_s: float | None = None
    limit_ratio: float | None = None

    def __post_init__(self) -> None:
        limits = [v for v in (self.limit_s, self.limit_ratio) if v is not None]
        if self.stat not in STATISTICS or len(limits) != 1 or not _is_limit(limits[0]):
            raise UsageError(f"{self}: expected a known statistic and one limit above 0")

    @classmethod
    def parse(cls, text: str) -> Guard:
        """Read ``tpot_p99=0.05`` (seconds) or ``tpot_p99=1.2x`` (local over remote).

        A number from 1 on is a ratio without its ``x``, too: a second per token is no limit.
        """
        name, _, limit = text.partition("=")
        kind, _, stat = name.partition("_")
        value = _positive(limit.removesuffix("x"))
        if kind != "tpot" or stat not in STATISTICS or value is None:
            raise UsageError(
                f"--guard {text!r}: expected tpot_STAT=LIMIT with STAT one of "
                f"{', '.join(STATISTICS)}, as in tpot_p99=0.05 (seconds) or tpot_p99=1.2x (ratio)"
            )
        is_ratio = limit.endswith("x") or value >= 1
        return cls(stat, None, value) if is_ratio else cls(stat, value)

    def known(self, remote: Side, local: Side) -> bool:
        """Whether both sides have what it compares; a guard that sees nothing guards nothing."""
        sides = (local,) if self.limit_s is not None else (remote, local)
        return all(side.all_tpot_s.get(self.stat) is not None for side in sides)

    def vetoes(self, remote: Side, local: Side) -> bool:
        after = local.all_tpot_s.get(self.stat)
        before = remote.all_tpot_s.get(self.stat)
        if after is None:
            return False
        if self.limit_s is not None:
            return after > self.limit_s
        return bool(before) and after > (self.limit_ratio or 0) * (before or 0)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of one request; the route that keeps more requests inside both wins."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (_is_limit(self.ttft_s) and _is_limit(self.tpot_s)):
            raise UsageError(f"{self}: expected limits above 0")

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read ``ttft=0.2,tpot=0.03`` (seconds)."""
        parts = [part.partition("=")[::2] for part in text.split(",")]
        limits = [_positive(dict(parts).get(name, "")) for name in ("ttft", "tpot")]
        if sorted(name for name, _ in parts) != ["tpot", "ttft"] or None in limits:
            raise UsageError(
                f"--slo {text!r}: expected both limits in seconds, as in ttft=0.2,tpot=0.03"
            )
        return cls(*(limit or 0 for limit in limits))


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if _is_limit(value) else None


def _is_limit(value: float) -> bool:
    return isfinite(value) and value > 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How figures become decisions. ``max_distance`` is in octaves; beyond it the default holds."""

    w_ttft: float = 1.0
    w_tpot: float = 1.0
    stat: str = "mean"
    min_success: float = 0.95
    min_n: int = 1
    undecided: Choice = Choice.REMOTE
    guard: Guard | None = None
    slo: Slo | None = None
    max_distance: float | None = None

    def __post_init__(self) -> None:
        weights = (self.w_ttft, self.w_tpot)
        if not all(0 <= w <= LARGEST_WEIGHT for w in weights) or not any(weights):
            raise UsageError(
                f"weights w_ttft={self.w_ttft}, w_tpot={self.w_tpot}: "
                f"both must lie between 0 and {LARGEST_WEIGHT:g} and one above 0"
            )
        if self.stat not in STATISTICS:
            raise UsageError(f"statistic {self.stat!r}: expected one of {', '.join(STATISTICS)}")
        if not 0 <= self.min_success <= 1 or self.min_n < 1:
            raise UsageError(
                f"min_success={self.min_success}, min_n={self.min_n}: "
                "expected a success share between 0 and 1 and at least one sample"
            )
        if self.undecided is Choice.UNDECIDED:
            raise UsageError("the default of undecided cells is remote or local")
        if self.max_distance is not None and not _is_limit(self.max_distance):
            raise UsageError(f"max_distance={self.max_distance}: expected octaves above 0")


@dataclass(frozen=True, slots=True)
class Side:
    """One route's raw figures over Turn 2+; ``all_tpot_s`` covers all turns of the points.

    ``meets_slo`` is the share of issued later turns inside the rule's limits, where records allow.
    """

    n: int
    success: float
    ttft_s: Stats
    tpot_s: Stats
    all_tpot_s: Stats
    meets_slo: float | None = None

    def feasible(self, rule: Rule) -> bool:
        """Enough of its requests succeeded; at ``min_success`` 0 only a total failure counts."""
        return self.n > 0 and self.success > 0 and self.success >= rule.min_success


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a cell says under a rule, and the figures that say it."""

    choice: Choice
    status: Status
    d_ttft: float | None = None
    d_tpot: float | None = None
    s: float | None = None
    s_ci: tuple[float, float] | None = None
    vetoed: bool = False


def relative_gain(before: float | None, after: float | None) -> float:
    """(before − after)/before; 0 where the denominator is not positive or a figure is missing."""
    if before is None or after is None or not before > 0:
        return 0.0
    return (before - after) / before


def deltas(remote: Side, local: Side, stat: str) -> tuple[float, float]:
    """(Δ_ttft, Δ_tpot): the relative TTFT gain and the relative TPOT cost of local."""
    d_ttft = relative_gain(remote.ttft_s.get(stat), local.ttft_s.get(stat))
    d_tpot = 0.0 - relative_gain(remote.tpot_s.get(stat), local.tpot_s.get(stat))
    return d_ttft, d_tpot


def score(d_ttft: float, d_tpot: float, rule: Rule) -> float:
    return rule.w_ttft * d_ttft - rule.w_tpot * d_tpot


def interval(replicates: Mapping[str, Sequence[int]], rule: Rule) -> tuple[float, float]:
    """Percentile bootstrap interval of S from the stored replicates of its parts."""
    if rule.slo is not None:
        samples = np.asarray(replicates["d_slo"], dtype=float)
    else:
        d_ttft, d_tpot = (np.asarray(replicates[k], dtype=float) for k in ("d_ttft", "d_tpot"))
        samples = rule.w_ttft * d_ttft - rule.w_tpot * d_tpot
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples * REPLICATE_UNIT, [tail, 1 - tail])
    return float(low), float(high)


def judge(
    remote: Side, local: Side, rule: Rule, replicates: Mapping[str, Sequence[int]] | None = None
) -> Verdict:
    """The verdict over two sides; an infeasible side leaves the other, two leave nothing."""
    feasible = (remote.feasible(rule), local.feasible(rule))
    if not any(feasible):
        return Verdict(Choice.UNDECIDED, Status.FAILED)
    if not all(feasible):
        return Verdict(Choice.REMOTE if feasible[0] else Choice.LOCAL, Status.ONE_SIDED)
    d_ttft, d_tpot = deltas(remote, local, rule.stat)
    s = _share_gain(remote, local) if rule.slo else score(d_ttft, d_tpot, rule)
    s_ci = interval(replicates, rule) if replicates else None
    vetoed = rule.guard is not None and rule.guard.vetoes(remote, local)
    choice = Choice.REMOTE if vetoed else decide(s, s_ci)
    return Verdict(choice, Status.MEASURED, d_ttft, d_tpot, s, s_ci, vetoed)


def decide(s: float, s_ci: tuple[float, float] | None) -> Choice:
    """Local iff S > 0, unless the interval cannot tell."""
    if s_ci is not None and s_ci[0] <= 0 <= s_ci[1]:
        return Choice.UNDECIDED
    return Choice.LOCAL if s > 0 else Choice.REMOTE


def _share_gain(remote: Side, local: Side) -> float:
    if remote.meets_slo is None or local.meets_slo is None:
        raise UsageError(
            "--slo needs per-turn records, and a run without them is among those given; "
            "sweep again with keep_records = true in the grid"
        )
    return local.meets_slo - remote.meets_slo


def default_choice(text: str) -> Choice:
    """What undecided cells take, as given on the command line."""
    if text not in (Choice.REMOTE, Choice.LOCAL):
        raise UsageError(f"--undecided {text!r}: expected remote or local")
    return Choice(text)
