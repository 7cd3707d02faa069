"""Cells that nobody measured, between measured ones that agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from ppdbench.table.schema import AXES, Cell, Table, check_guard
from ppdbench.table.score import Choice, Rule, Status

Centre = tuple[float, ...]
LINES = ("rate_per_s", "context_tokens")
"""Axes along which a gap may be closed. New and output tokens are chosen together in most
workloads, so there is rarely a line along one of them."""


def fill(table: Table) -> Table:
    """Add the cells of the (shape × rate) product that are missing and whose neighbours agree.

    A gap is filled when, along at least one of :data:`LINES`, both nearest measured neighbours say
    the same, and no line has neighbours that disagree. Everything else stays missing. Cells filled
    before are dropped first: they followed from another rule.
    """
    measured = tuple(cell for cell in table.cells if cell.filled is None)
    base = Table(table.rule, table.provenance, measured)
    found = [cell for name in base.topologies for cell in _filled(base, name)]
    return Table(table.rule, table.provenance, (*measured, *found))


def reweight(table: Table, rule: Rule) -> Table:
    """The same evidence under another rule; a table that was filled is filled again.

    Raises:
        UsageError: a guard on a figure that a cell does not have.
    """
    check_guard(table.cells, rule)
    filled = any(cell.filled is not None for cell in table.cells)
    measured = tuple(cell for cell in table.cells if cell.filled is None)
    other = Table(rule, table.provenance, measured)
    return fill(other) if filled else other


def _filled(table: Table, topology: str) -> Iterator[Cell]:
    known: dict[Centre, Cell] = {}
    says: dict[Centre, Choice] = {}
    for cell, verdict in zip(table.cells, table.verdicts, strict=True):
        if cell.topology == topology:
            place = tuple(cell.centre[axis] for axis in AXES)
            known[place] = cell
            if verdict.status in (Status.MEASURED, Status.ONE_SIDED):
                says[place] = verdict.choice
    shapes = {place[:-1]: cell for place, cell in known.items()}
    rates = sorted({place[-1] for place in known})
    for shape, rate in product(sorted(shapes), rates):
        place = (*shape, rate)
        choice = None if place in known else _agreed(place, says)
        if choice is not None:
            yield Cell(
                topology=topology,
                workload=shapes[shape].workload,
                backend=shapes[shape].backend,
                centre=dict(zip(AXES, place, strict=True)),
                repeats=0,
                filled=choice,
            )


def _agreed(place: Centre, says: Mapping[Centre, Choice]) -> Choice | None:
    """What all neighbours along all lines that have two of them say; ``None`` if they differ."""
    votes: set[Choice] = set()
    for axis in map(AXES.index, LINES):
        below, above = _neighbours(place, axis, says)
        if below is not None and above is not None:
            votes |= {below, above}
    return votes.pop() if len(votes) == 1 and Choice.UNDECIDED not in votes else None


def _neighbours(
    place: Centre, axis: int, says: Mapping[Centre, Choice]
) -> tuple[Choice | None, Choice | None]:
    """The nearest on either side of ``place`` along one axis, all others being equal."""
    rest = place[:axis] + place[axis + 1 :]
    line = {p[axis]: choice for p, choice in says.items() if p[:axis] + p[axis + 1 :] == rest}
    below = max((v for v in line if v < place[axis]), default=None)
    above = min((v for v in line if v > place[axis]), default=None)
    return (
        None if below is None else line[below],
        None if above is None else line[above],
    )
