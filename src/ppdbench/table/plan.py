"""Which cells are worth measuring again: where a wrong decision is likely and would cost much.

A cell's value is the expected value of perfect information about its S: with S ~ N(s, σ²) the
decision by the sign of s loses, in expectation, σ·φ(z) − |s|·Φ(−z) with z = |s|/σ against knowing
S. Weighted by how much traffic looks the cell up, it says where a measurement pays most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt

import numpy as np
from scipy.stats import norm

from ppdbench.table.schema import Cell, Table
from ppdbench.table.score import REPLICATE_UNIT, Rule, Status, Verdict

ASSUMED_TTFT_SPREAD, ASSUMED_TPOT_SPREAD = 0.5, 0.1
"""Standard deviation of one turn's figure over its mean, where no interval was measured."""

Place = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Worth:
    """A (workload, rate) and the summed value of its cells, in units of S times traffic share."""

    workload: str
    rate_per_s: float
    value: float
    cells: int


def worths(table: Table, topology: str, traffic: Mapping[int, float] | None = None) -> list[Worth]:
    """Most valuable first. ``traffic`` weighs cells by index; without it all weigh the same.

    Cells of which a route failed are left out: measuring again does not mend a failure.
    """
    values = _values(table, topology)
    total = len(values) if traffic is None else sum(traffic.values())
    found: dict[Place, list[float]] = {}
    for index, value in values.items():
        cell = table.cells[index]
        share = (1.0 if traffic is None else traffic.get(index, 0.0)) / total
        found.setdefault((cell.workload, cell.centre["rate_per_s"]), []).append(value * share)
    places = [Worth(*place, sum(parts), len(parts)) for place, parts in found.items()]
    return sorted(places, key=lambda p: (-p.value, p.workload, p.rate_per_s))


def _values(table: Table, topology: str) -> dict[int, float]:
    spreads: dict[int, float] = {}
    unknown: list[int] = []
    for index, (cell, verdict) in enumerate(zip(table.cells, table.verdicts, strict=True)):
        if cell.topology != topology:
            continue
        if verdict.status is Status.MEASURED:
            spreads[index] = spread_of_s(cell, verdict, table.rule)
        elif verdict.status is Status.INTERPOLATED:
            unknown.append(index)
    values = {i: expected_loss(table.verdicts[i].s or 0.0, sd) for i, sd in spreads.items()}
    widest = max(spreads.values(), default=1.0)
    return values | {index: expected_loss(0.0, widest) for index in unknown}


def expected_loss(s: float, spread: float) -> float:
    """What deciding by the sign of ``s`` loses in expectation when S ~ N(s, spread²)."""
    if spread <= 0:
        return 0.0
    z = abs(s) / spread
    return float(spread * norm.pdf(z) - abs(s) * norm.sf(z))


def spread_of_s(cell: Cell, verdict: Verdict, rule: Rule) -> float:
    """σ of S: from the bootstrap where there is one, else assumed from the number of turns."""
    assert cell.remote is not None
    assert cell.local is not None
    if verdict.s_ci is not None and cell.replicates is not None:
        return _bootstrap_spread(cell.replicates, rule)
    turns = max(min(cell.remote.n, cell.local.n), 1)
    if rule.slo is not None:
        return sqrt(0.5 / turns)
    one = hypot(rule.w_ttft * ASSUMED_TTFT_SPREAD, rule.w_tpot * ASSUMED_TPOT_SPREAD)
    return one * sqrt(2 / turns)


def _bootstrap_spread(replicates: Mapping[str, Sequence[int]], rule: Rule) -> float:
    if rule.slo is not None:
        samples = np.asarray(replicates["d_slo"], dtype=np.float64)
    else:
        d_ttft, d_tpot = (np.asarray(replicates[k], dtype=np.float64) for k in ("d_ttft", "d_tpot"))
        samples = rule.w_ttft * d_ttft - rule.w_tpot * d_tpot
    return float(samples.std(ddof=1)) * REPLICATE_UNIT
