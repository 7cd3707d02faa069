"""Two tables side by side, and one table against itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ppdbench.table.schema import Cell, Table
from ppdbench.table.score import Choice, Rule, Status, Verdict

THIN_TURNS = 30
Key = tuple[str, tuple[tuple[str, float], ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """A cell whose decision or status differs.

    ``why``: ``rule`` when the first table's figures already give the second decision under the
    second rule, ``figures`` when the second's figures give it under the first rule, ``both``
    when it needs the two together.
    """

    cell: Cell
    before: Verdict
    after: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Difference:
    """``rule`` and ``provenance`` hold (before, after) per field that differs."""

    changed: list[Change]
    only_first: list[Cell]
    only_second: list[Cell]
    rule: dict[str, tuple[Any, Any]]
    provenance: dict[str, tuple[Any, Any]]


def diff(first: Table, second: Table) -> Difference:
    ours, theirs = _by_key(first), _by_key(second)
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    return Difference(
        changed=[
            Change(b[0], a[1], b[1], _why(first, second, a[0], b[0]))
            for a, b in pairs
            if (a[1].choice, a[1].status) != (b[1].choice, b[1].status)
        ],
        only_first=[ours[key][0] for key in ours if key not in theirs],
        only_second=[theirs[key][0] for key in theirs if key not in ours],
        rule=_differing(_rule_fields(first), _rule_fields(second)),
        provenance=_differing(dict(first.provenance), dict(second.provenance)),
    )


def _by_key(table: Table) -> dict[Key, tuple[Cell, Verdict]]:
    pairs = zip(table.cells, table.verdicts, strict=True)
    return {cell.key: (cell, verdict) for cell, verdict in pairs}


def _why(first: Table, second: Table, before: Cell, after: Cell) -> str:
    if before.filled is not None or after.filled is not None:
        return "figures"
    wanted = after.verdict(second.rule).choice
    if before.verdict(second.rule).choice is wanted:
        return "rule"
    return "figures" if after.verdict(first.rule).choice is wanted else "both"


def _rule_fields(table: Table) -> dict[str, Any]:
    return {name: getattr(table.rule, name) for name in type(table.rule).__slots__}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


# --- one table


@dataclass(frozen=True, slots=True)
class Warnings:
    """What a careful reader of a sound table should know, as sentences."""

    sentences: list[str]
    flips: list[str]
    """Lines of cells whose decision changes more than once: noise, or a real island."""


def check(table: Table) -> Warnings:
    cells, verdicts = table.cells, table.verdicts
    measured = [
        (cell, verdict)
        for cell, verdict in zip(cells, verdicts, strict=True)
        if verdict.status is Status.MEASURED
    ]
    thin = sum(_thin(cell) for cell, _ in measured)
    unsure = sum(verdict.s_ci is None for _, verdict in measured)
    few = sum(v.s_ci is not None and 1 < c.repeats < 5 and c.spread is None for c, v in measured)
    flips = list(_flips(table))
    found = [
        (table.simulated, "figures come from the simulator"),
        (thin, f"{thin} cells rest on fewer than {THIN_TURNS} later turns on a side"),
        (unsure, f"{unsure} cells have no interval: the sign of S decided"),
        (few, f"{few} cells have intervals from fewer than five repeats: read them as ranges"),
        *(
            (n, f"{n} cells are {status.value}")
            for status in (Status.ONE_SIDED, Status.FAILED, Status.INTERPOLATED)
            for n in [sum(v.status is status for v in verdicts)]
        ),
        (len(flips), f"{len(flips)} lines of cells change their decision more than once"),
    ]
    return Warnings([sentence for holds, sentence in found if holds], flips)


def _thin(cell: Cell) -> bool:
    sides = (cell.remote, cell.local)
    return any(side is not None and side.n < THIN_TURNS for side in sides)


def _flips(table: Table) -> Iterator[str]:
    """Along the rate at one shape, and along new tokens at one context and rate."""
    for axis, fixed in (
        ("rate_per_s", ("context_tokens", "new_tokens", "output_tokens")),
        ("new_tokens", ("context_tokens", "rate_per_s")),
    ):
        lines: dict[tuple[Any, ...], list[tuple[float, Choice]]] = defaultdict(list)
        for cell, verdict in zip(table.cells, table.verdicts, strict=True):
            if verdict.choice is not Choice.UNDECIDED:
                place = (cell.topology, *(cell.centre[name] for name in fixed))
                lines[place].append((cell.centre[axis], verdict.choice))
        for place, line in lines.items():
            choices = [choice for _, choice in sorted(line)]
            if sum(a is not b for a, b in pairwise(choices)) > 1:
                where = ", ".join(f"{n}={v:g}" for n, v in zip(fixed, place[1:], strict=True))
                yield f"{place[0]} along {axis} at {where}: {' '.join(c.value for c in choices)}"


def flip_ratio(verdict: Verdict) -> float | None:
    """r* = Δ_ttft/Δ_tpot: the w_tpot/w_ttft from which the cell turns remote.

    ``None`` where local costs no TPOT (it never turns) or gains no TTFT (it never was local).
    """
    if verdict.d_ttft is None or verdict.d_tpot is None:
        return None
    if verdict.d_tpot <= 0 or verdict.d_ttft <= 0:
        return None
    return verdict.d_ttft / verdict.d_tpot


def weight_ratio(rule: Rule) -> float | None:
    """The w_tpot/w_ttft that r* is compared with; ``None`` without a w_ttft or with limits."""
    return None if rule.slo is not None or not rule.w_ttft else rule.w_tpot / rule.w_ttft


def flip_ratios(table: Table) -> list[float | None]:
    """r* per cell, in the order of the cells; all ``None`` where limits decide, not weights."""
    limits = table.rule.slo is not None
    return [None if limits else flip_ratio(verdict) for verdict in table.verdicts]


def next_to_flip(table: Table) -> list[tuple[float, int]]:
    """(r*, cell) of those that turn remote when TPOT weighs more than now, soonest first.

    A cell that the guard vetoed is remote already.
    """
    now = weight_ratio(table.rule)
    pairs = zip(flip_ratios(table), table.verdicts, strict=True)
    return sorted(
        (ratio, index)
        for index, (ratio, verdict) in enumerate(pairs)
        if ratio is not None and now is not None and ratio > now and not verdict.vetoed
    )
