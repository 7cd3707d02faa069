"""From runs to a table: pair the sides, make cells, apply the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ppdbench import __version__
from ppdbench.core.errors import NothingUsableError
from ppdbench.core.topology import Topology
from ppdbench.table.inputs import (
    Pairing,
    Place,
    Point,
    RunInput,
    SidePoint,
    check_poolable,
    points_at,
)
from ppdbench.table.schema import Cell, Table, plain
from ppdbench.table.score import STATISTICS, Rule, Side, Stats

FEATURES = ("context_tokens", "new_tokens", "output_tokens")


@dataclass(slots=True)
class Built:
    """A table and what did not become a cell: places with one side only, and thin ones."""

    table: Table
    unpaired: list[Place] = field(default_factory=list)
    thin: list[Place] = field(default_factory=list)


def build_table(runs: Sequence[RunInput], bases: Sequence[str], rule: Rule) -> Built:
    """Compare remote and local at every place that has both.

    Live cells win over simulated ones, place by place. The result depends on what the runs hold,
    not on their order or where they lie.

    Raises:
        TableError: runs that may not be pooled.
        NothingUsableError: no place has both sides.
    """
    runs = sorted(runs, key=lambda run: run.digest)
    check_poolable(runs)
    unpaired: list[Place] = []
    thin: list[Place] = []
    cells: list[Cell] = []
    for base in bases:
        cells += _cells_of_base(runs, Pairing.of(Topology.parse(base)), rule, unpaired, thin)
    if not cells:
        raise NothingUsableError(_nothing_to_compare(bases, unpaired, thin))
    return Built(Table(rule, _provenance(runs, bases), tuple(cells)), unpaired, thin)


def _nothing_to_compare(bases: Sequence[str], unpaired: list[Place], thin: list[Place]) -> str:
    return (
        f"no cell for base {', '.join(bases)}: {len(unpaired)} places have one side only and "
        f"{len(thin)} have too few samples; sweep the base under remote and local, "
        "or lower --min-n"
    )


def _cells_of_base(
    runs: Sequence[RunInput], pairing: Pairing, rule: Rule, unpaired: list[Place], thin: list[Place]
) -> Iterator[Cell]:
    covered: set[Place] = set()
    live = [run for run in runs if not run.simulated]
    simulated = [run for run in runs if run.simulated]
    for group in (live, simulated):
        remote, local = points_at(group, pairing.remote), points_at(group, pairing.local)
        replicas = points_at(group, [(pairing.replica, p) for p in ("roles", "remote", "local")])
        unpaired += sorted(remote.keys() ^ local.keys())
        for place in sorted((remote.keys() & local.keys()) - covered):
            covered.add(place)
            cell = _cell(pairing, remote[place], local[place], replicas.get(place, []))
            if _thin(cell, rule):
                thin.append(place)
            else:
                yield cell


def _thin(cell: Cell, rule: Rule) -> bool:
    """A side that works but has too few samples; one that failed is no matter of samples."""
    sides = [side for side in (cell.remote, cell.local) if side and side.feasible(rule)]
    return any(side.n < rule.min_n for side in sides)


def _cell(
    pairing: Pairing, remote: list[SidePoint], local: list[SidePoint], replica: list[SidePoint]
) -> Cell:
    first = remote[0]
    return Cell(
        topology=pairing.base,
        workload=first.point["workload"],
        backend=first.run.backend,
        centre=_centre([*remote, *local], first.point),
        repeats=len({(p.run.digest, p.point["repeat"]) for p in remote}),
        remote=_side(remote),
        local=_side(local),
        replica=_side(replica) if replica else None,
        replica_topology=pairing.replica if replica else None,
    )


def _centre(points: Sequence[SidePoint], first: Point) -> dict[str, float]:
    """Mean lengths over both sides, weighted by later turns, and the rate."""
    weights = [_n(p.point) for p in points]
    centre = {}
    for name in FEATURES:
        means = [(p.point["turn2plus"][name] or {}).get("mean") for p in points]
        known = [(m, w or 1) for m, w in zip(means, weights, strict=True) if m is not None]
        centre[name] = plain(sum(m * w for m, w in known) / sum(w for _, w in known))
    return {**centre, "rate_per_s": float(first["rate_per_s"])}


def _n(point: Point) -> int:
    return int(point["turn2plus"]["n"])


def _side(points: Sequence[SidePoint]) -> Side:
    """Pool repeats: counts add, statistics are means over the points weighted by their turns."""
    measured = [p.point for p in points if _n(p.point)]
    return Side(
        n=sum(_n(p) for p in measured),
        success=fmean(float(p.point["success"]) for p in points),
        ttft_s=_pooled(measured, "turn2plus", "ttft_s"),
        tpot_s=_pooled(measured, "turn2plus", "tpot_s"),
        all_tpot_s=_pooled(measured, "all", "tpot_s"),
    )


def _pooled(points: Sequence[Point], group: str, quantity: str) -> Stats:
    return {stat: _weighted(points, group, quantity, stat) for stat in STATISTICS}


def _weighted(points: Sequence[Point], group: str, quantity: str, stat: str) -> float | None:
    pairs: list[tuple[float, int]] = []
    for point in points:
        value = (point[group].get(quantity) or {}).get(stat)
        if value is not None:
            pairs.append((value, int(point[group]["n"])))
    if len(pairs) == 1:
        return float(pairs[0][0])
    total = sum(n for _, n in pairs)
    return sum(value * n for value, n in pairs) / total if total else None


IDENTITY = ("engine", "engine_version", "model", "dtype", "gpu", "connector", "block_size", "flags")
"""What a cluster must match for the figures to hold there."""


def _provenance(runs: Sequence[RunInput], bases: Sequence[str]) -> dict[str, Any]:
    """What the figures hold for. No time, no path: equal runs give equal bytes."""
    by_trust = [run.manifest.document() for run in sorted(runs, key=lambda run: run.simulated)]
    return {
        "bases": list(bases),
        "backend": "+".join(sorted({run.backend for run in runs})),
        "tool_version": __version__,
        "runs": [{"backend": run.backend, "digest": run.digest} for run in runs],
        **{name: _first_known(by_trust, name) for name in IDENTITY},
    }


def _first_known(documents: Sequence[dict[str, Any]], name: str) -> object:
    """A live run's word comes before a simulated one's."""
    return next((d[name] for d in documents if d[name] not in (None, {})), None)
