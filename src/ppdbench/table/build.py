"""From runs to a table: pair the sides, make cells, apply the rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppdbench import __version__
from ppdbench.core.errors import NothingUsableError, UsageError
from ppdbench.core.topology import Topology
from ppdbench.runs.manifest import SIMULATED
from ppdbench.table.cells import Compared, aggregate_cell, turn_cells
from ppdbench.table.inputs import (
    Pairing,
    Place,
    RunInput,
    barred,
    check_poolable,
    points_at,
)
from ppdbench.table.paired import Bin, Turns, length_bins, paired_turns
from ppdbench.table.schema import Cell, Table, check_guard
from ppdbench.table.score import STATISTICS, Rule


@dataclass(slots=True)
class Built:
    """A table and what did not become a cell.

    Places with one side only, places with too few samples, cells that stand where a better
    sampled one does, and points that may never vote.
    """

    table: Table
    unpaired: list[Place] = field(default_factory=list)
    thin: list[Place] = field(default_factory=list)
    doubled: list[Cell] = field(default_factory=list)
    barred: Counter[str] = field(default_factory=Counter)


def build_table(runs: Sequence[RunInput], bases: Sequence[str], rule: Rule) -> Built:
    """Compare remote and local at every place that has both.

    Live cells win over simulated ones, place by place. The result depends on what the runs hold,
    not on their order or where they lie.

    Raises:
        TableError: a run given twice.
        RunError: runs that may not be pooled.
        UsageError: a base given twice, a statistic that a run does not know.
        NothingUsableError: no place has both sides.
    """
    runs = sorted(runs, key=lambda run: run.digest)
    check_poolable(runs)
    left_out = _LeftOut()
    _check_bases(bases)
    pairings = [Pairing.of(Topology.parse(base)) for base in bases]
    cells = [cell for pairing in pairings for cell in _of_base(runs, pairing, rule, left_out)]
    if not cells:
        raise NothingUsableError(_nothing_to_compare(bases, left_out))
    _check_statistic(cells, rule)
    check_guard(cells, rule)
    kept, doubled = _one_per_centre(cells)
    table = Table(rule, _provenance(runs, bases), kept)
    return Built(table, left_out.unpaired, left_out.thin, doubled, left_out.barred)


def _check_statistic(cells: Sequence[Cell], rule: Rule) -> None:
    """A statistic that a source does not know would score 0 everywhere and look like an answer."""
    for cell in cells:
        sides = [side for side in (cell.remote, cell.local) if side and side.feasible(rule)]
        if any(side.ttft_s.get(rule.stat) is None for side in sides):
            known = [name for name in STATISTICS if all(s.ttft_s.get(name) for s in sides)]
            raise UsageError(
                f"--stat {rule.stat}: {cell.workload} at {cell.centre['rate_per_s']:g}/s has no "
                f"such figure; known there: {', '.join(known) or 'none'}"
            )


def _check_bases(bases: Sequence[str]) -> None:
    names = [str(Topology.parse(base)) for base in bases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--base {twice} is given twice; give each base once")


def _one_per_centre(cells: Sequence[Cell]) -> tuple[tuple[Cell, ...], list[Cell]]:
    """Workloads may share a turn shape; the cell with more turns on its weaker side stays.

    A live cell stays before any simulated one, however many turns a simulation has.
    """
    kept: dict[object, Cell] = {}
    for cell in sorted(cells, key=lambda c: (c.backend == SIMULATED, -_weaker_n(c), c.workload)):
        kept.setdefault(cell.key, cell)
    return tuple(kept.values()), [cell for cell in cells if kept[cell.key] is not cell]


def _weaker_n(cell: Cell) -> int:
    return min(side.n if side else 0 for side in (cell.remote, cell.local))


@dataclass(slots=True)
class _LeftOut:
    unpaired: list[Place] = field(default_factory=list)
    thin: list[Place] = field(default_factory=list)
    barred: Counter[str] = field(default_factory=Counter)


def _of_base(
    runs: Sequence[RunInput], pairing: Pairing, rule: Rule, left_out: _LeftOut
) -> Iterator[Cell]:
    left_out.barred += barred(runs, (*pairing.remote, *pairing.local))
    for work in _compared(runs, pairing, left_out.unpaired):
        if not work.compared.has_later_turns:
            left_out.thin.append(work.place)
            continue
        for cell in _cells(work, rule):
            if _thin(cell, rule):
                left_out.thin.append(work.place)
            else:
                yield cell


def _nothing_to_compare(bases: Sequence[str], left_out: _LeftOut) -> str:
    codes = ", ".join(f"{count} {code}" for code, count in sorted(left_out.barred.items()))
    return (
        f"no cell for base {', '.join(bases)}: {len(left_out.unpaired)} places have one side "
        f"only, {len(left_out.thin)} have too few samples, and points that may never vote: "
        f"{codes or 'none'}; sweep the base under remote and local, or lower --min-n"
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """A place to compare, its turns where they were kept, and the bins of its workload."""

    place: Place
    compared: Compared
    turns: Turns | None
    bins: Sequence[Bin]


def _compared(runs: Sequence[RunInput], pairing: Pairing, unpaired: list[Place]) -> Iterator[_Work]:
    covered: set[Place] = set()
    live = [run for run in runs if not run.simulated]
    simulated = [run for run in runs if run.simulated]
    for group in (live, simulated):
        found = _comparisons(group, pairing, unpaired)
        fresh = {place: one for place, one in found.items() if place not in covered}
        covered |= fresh.keys()
        yield from _with_turns(fresh)


def _comparisons(
    runs: Sequence[RunInput], pairing: Pairing, unpaired: list[Place]
) -> dict[Place, Compared]:
    remote, local = points_at(runs, pairing.remote), points_at(runs, pairing.local)
    replica = points_at(runs, [(pairing.replica, p) for p in ("roles", "remote", "local")])
    unpaired += sorted(remote.keys() ^ local.keys())
    return {
        place: Compared(pairing, remote[place], local[place], replica.get(place, []))
        for place in sorted(remote.keys() & local.keys())
    }


def _with_turns(found: Mapping[Place, Compared]) -> Iterator[_Work]:
    turns = {place: paired_turns(one.remote, one.local) for place, one in found.items()}
    for workload in dict.fromkeys(workload for workload, _ in found):
        places = [place for place in found if place[0] == workload]
        kept = [t for place in places if (t := turns[place]) is not None and len(t)]
        bins = length_bins(kept) if kept else []
        for place in places:
            yield _Work(place, found[place], turns[place], bins)


def _cells(work: _Work, rule: Rule) -> Iterator[Cell]:
    if work.turns is None or not len(work.turns):
        yield aggregate_cell(work.compared, rule)
    else:
        yield from turn_cells(work.compared, work.turns, work.bins, rule)


def _thin(cell: Cell, rule: Rule) -> bool:
    """A side that works but has too few samples; one that failed is no matter of samples."""
    sides = [side for side in (cell.remote, cell.local) if side and side.feasible(rule)]
    return any(side.n < rule.min_n for side in sides)


IDENTITY = ("engine", "engine_version", "model", "dtype", "gpu", "connector", "block_size", "flags")
"""What a cluster must match for the figures to hold there."""


def _provenance(runs: Sequence[RunInput], bases: Sequence[str]) -> dict[str, Any]:
    """What the figures hold for. No time, no path: equal runs give equal bytes."""
    by_trust = [run.manifest.document() for run in sorted(runs, key=lambda run: run.simulated)]
    return {
        "bases": list(bases),
        "pairs": {base: str(Topology.parse(base).twin()) for base in bases},
        "backend": "+".join(sorted({run.backend for run in runs})),
        "grids": sorted({run.manifest.grid for run in runs}),
        "tool_version": __version__,
        "runs": [{"backend": run.backend, "digest": run.digest} for run in runs],
        **{name: _first_known(by_trust, name) for name in IDENTITY},
        "tensor_parallel": _first_known([d["flags"] for d in by_trust], "tensor_parallel"),
    }


def _first_known(documents: Sequence[dict[str, Any]], name: str) -> object:
    """A live run's word comes before a simulated one's."""
    return next((d[name] for d in documents if d.get(name) not in (None, {})), None)
