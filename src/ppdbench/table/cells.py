"""Cells of one place: from turns where they were kept, else from aggregates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ppdbench.core.seeds import seed_for
from ppdbench.table import resample
from ppdbench.table.inputs import Pairing, Point, SidePoint
from ppdbench.table.paired import LENGTHS, Bin, Floats, Turns, paired_turns
from ppdbench.table.schema import Cell, plain
from ppdbench.table.score import STATISTICS, Rule, Side, Stats

REMOTE, LOCAL = 0, 1


@dataclass(frozen=True, slots=True)
class Compared:
    """The points of both sides at one place, and of sticky replicas where a run has them."""

    pairing: Pairing
    remote: Sequence[SidePoint]
    local: Sequence[SidePoint]
    replica: Sequence[SidePoint]

    @property
    def first(self) -> SidePoint:
        return self.remote[0]

    @property
    def rate_per_s(self) -> float:
        return float(self.first.point["rate_per_s"])

    @property
    def repeats(self) -> int:
        return len({(p.run.digest, p.point["repeat"]) for p in self.remote})

    @property
    def has_later_turns(self) -> bool:
        """Without one on either side nothing says which lengths a cell would stand for."""
        groups = [p.point["turn2plus"] for p in (*self.remote, *self.local)]
        return all(
            any((group[name] or {}).get("mean") is not None for group in groups) for name in LENGTHS
        )

    def seed(self, *names: object) -> int:
        return seed_for(
            0, "table", self.pairing.base, self.first.point["workload"], self.rate_per_s, *names
        )

    def cell(self, centre: dict[str, float], **parts: object) -> Cell:
        return Cell(
            topology=self.pairing.base,
            workload=self.first.point["workload"],
            backend=self.first.run.backend,
            centre={**centre, "rate_per_s": self.rate_per_s},
            repeats=self.repeats,
            replica_topology=self.pairing.replica if parts["replica"] else None,
            **parts,  # type: ignore[arg-type]
        )


# --- from aggregates


def aggregate_cell(compared: Compared, rule: Rule) -> Cell:
    """One cell at the mean lengths; an interval needs two repeats."""
    return compared.cell(
        _mean_lengths([*compared.remote, *compared.local]),
        remote=_pooled_side(compared.remote),
        local=_pooled_side(compared.local),
        replica=_pooled_side(compared.replica) if compared.replica else None,
        replicates=_repeat_replicates(compared, rule.stat),
    )


def _mean_lengths(points: Sequence[SidePoint]) -> dict[str, float]:
    """Over both sides, weighted by later turns."""
    weights = [_n(p.point) or 1 for p in points]
    centre = {}
    for name in LENGTHS:
        means = [(p.point["turn2plus"][name] or {}).get("mean") for p in points]
        known = [(m, w) for m, w in zip(means, weights, strict=True) if m is not None]
        centre[name] = plain(sum(m * w for m, w in known) / sum(w for _, w in known))
    return centre


def _n(point: Point) -> int:
    return int(point["turn2plus"]["n"])


def _success(points: Sequence[SidePoint]) -> float:
    return fmean(float(p.point["success"]) for p in points)


def _pooled_side(points: Sequence[SidePoint]) -> Side:
    """Pool repeats: counts add, statistics are means over the points weighted by their turns."""
    return Side(
        n=sum(_n(p.point) for p in points),
        success=_success(points),
        ttft_s=_pooled(points, "turn2plus", "ttft_s"),
        tpot_s=_pooled(points, "turn2plus", "tpot_s"),
        all_tpot_s=_pooled(points, "all", "tpot_s"),
    )


def _pooled(points: Sequence[SidePoint], group: str, quantity: str) -> Stats:
    return {stat: _weighted(points, group, quantity, stat) for stat in STATISTICS}


def _weighted(points: Sequence[SidePoint], group: str, quantity: str, stat: str) -> float | None:
    pairs = [
        (value, int(p.point[group]["n"]))
        for p in points
        if (value := _figure(p.point, group, quantity, stat)) is not None
    ]
    if len(pairs) == 1:
        return float(pairs[0][0])
    total = sum(n for _, n in pairs)
    return sum(value * n for value, n in pairs) / total if total else None


def _figure(point: Point, group: str, quantity: str, stat: str) -> float | None:
    value: float | None = (point[group].get(quantity) or {}).get(stat)
    return value


def _repeat_replicates(compared: Compared, stat: str) -> resample.Replicates | None:
    """Repeats that have figures on both sides, paired, each as heavy as its turns."""
    local = {(p.run.digest, p.point["repeat"]): p.point for p in compared.local}
    rows = []
    for one in compared.remote:
        other = local.get((one.run.digest, one.point["repeat"]))
        if other is not None and _n(one.point) and _n(other):
            figures = [
                _figure(point, "turn2plus", quantity, stat)
                for quantity in ("ttft_s", "tpot_s")
                for point in (one.point, other)
            ]
            rows.append([*figures, _n(one.point) + _n(other)])
    known = np.array(rows, dtype=np.float64).reshape(-1, 5)
    return resample.of_repeats(known[:, :2], known[:, 2:4], known[:, 4], compared.seed())


# --- from turns


def turn_cells(compared: Compared, turns: Turns, bins: Sequence[Bin], rule: Rule) -> Iterator[Cell]:
    """A cell per bin that holds a turn here; figures over turns that succeeded on both sides."""
    replica = paired_turns(compared.replica, replicas=True) if compared.replica else None
    for number, part in enumerate(bins):
        inside = turns.take(part.holds(turns.lengths))
        if not len(inside):
            continue
        yield compared.cell(
            dict(part.centre),
            spread=part.spread,
            remote=_turn_side(inside, REMOTE, compared.remote, rule),
            local=_turn_side(inside, LOCAL, compared.local, rule),
            replica=_replica_side(replica, part, compared.replica, rule),
            replicates=resample.of_turns(inside, rule.stat, rule.slo, compared.seed(number)),
        )


def _turn_side(turns: Turns, column: int, points: Sequence[SidePoint], rule: Rule) -> Side:
    """Pairs count where there are any; a side alone is described by its own good turns."""
    paired = np.asarray(turns.ok.all(axis=1))
    counted = turns.take(paired if paired.any() else turns.ok[:, column])
    return Side(
        n=len(counted),
        success=_success(points),
        ttft_s=_stats(counted.ttft_s[:, column]),
        tpot_s=_stats(counted.tpot_s[:, column]),
        all_tpot_s=_pooled(points, "all", "tpot_s"),
        meets_slo=float(resample.meets(turns, rule.slo)[:, column].mean()) if rule.slo else None,
    )


def _replica_side(
    turns: Turns | None, part: Bin, points: Sequence[SidePoint], rule: Rule
) -> Side | None:
    inside = turns.take(part.holds(turns.lengths)) if turns is not None else None
    return _turn_side(inside, 0, points, rule) if inside is not None and len(inside) else None


def _stats(values: Floats) -> Stats:
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(STATISTICS)
    quantiles = np.quantile(known, list(resample.QUANTILES.values())).tolist()
    return {
        "mean": float(known.mean()),
        **dict(zip(resample.QUANTILES, quantiles, strict=True)),
    }
