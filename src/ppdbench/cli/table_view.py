"""How a table looks in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ppdbench.table.compare import flip_ratios, next_to_flip, weight_ratio
from ppdbench.table.regret import Regret
from ppdbench.table.schema import SIMULATED_NOTICE, Cell, Table, counts, describe
from ppdbench.table.score import Choice, Status, Verdict

FIRST_FLIPS = 8
MARKS = {Status.ONE_SIDED: "·", Status.INTERPOLATED: "~", Status.FAILED: "×", Status.MEASURED: ""}
WIDE = 250
"""Columns when stdout is no terminal: a heat map must not wrap in a file."""

Shape = tuple[float, float, float]


def summary(table: Table) -> dict[str, Any]:
    """Counts, digest and origin, as every command of the group prints them."""
    return {
        **counts(table),
        "digest": table.digest,
        "simulated": table.simulated,
        "topologies": list(table.topologies),
    }


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, highlight=False)


def heat_maps(table: Table) -> None:
    """One map per topology, then the weights at which cells flip first."""
    out = console()
    out.print(_headline(table))
    for topology in table.topologies:
        out.print(_heat_map(table, topology))
    out.print(
        "L local, R remote, ? undecided; · one side only, ~ interpolated, × neither; S beside"
    )
    _print_flips(out, table)


def _headline(table: Table) -> str:
    rule = table.rule
    asked = (
        f"limits TTFT {rule.slo.ttft_s:g} s, TPOT {rule.slo.tpot_s:g} s"
        if rule.slo
        else f"weights TTFT {rule.w_ttft:g}, TPOT {rule.w_tpot:g}, on {rule.stat}"
    )
    told = ", ".join(f"{value} {name}" for name, value in counts(table).items() if value)
    lines = [f"{told}; {asked}", f"{table.provenance.get('backend')}, {table.digest}"]
    return "\n".join([SIMULATED_NOTICE, *lines] if table.simulated else lines)


def _heat_map(table: Table, topology: str) -> Grid:
    pairs = [
        (cell, verdict)
        for cell, verdict in zip(table.cells, table.verdicts, strict=True)
        if cell.topology == topology
    ]
    rates = sorted({cell.centre["rate_per_s"] for cell, _ in pairs})
    grid = Grid(title=topology, title_justify="left", pad_edge=False)
    grid.add_column("context + new → output")
    for rate in rates:
        grid.add_column(f"{rate:g}/s", justify="right")
    for shape, name in _shapes(cell for cell, _ in pairs):
        row = {cell.centre["rate_per_s"]: (cell, v) for cell, v in pairs if _shape(cell) == shape}
        grid.add_row(name, *(_mark(row[rate][1]) if rate in row else Text("") for rate in rates))
    return grid


def _shape(cell: Cell) -> Shape:
    centre = cell.centre
    return centre["context_tokens"], centre["new_tokens"], centre["output_tokens"]


def _shapes(cells: Iterable[Cell]) -> list[tuple[Shape, str]]:
    shapes = sorted({_shape(cell) for cell in cells})
    return [(shape, f"{shape[0]:g} + {shape[1]:g} → {shape[2]:g}") for shape in shapes]


def _mark(verdict: Verdict) -> Text:
    letter = {Choice.LOCAL: "L", Choice.REMOTE: "R", Choice.UNDECIDED: "?"}[verdict.choice]
    number = "" if verdict.s is None else f" {verdict.s:+.2f}"
    return Text(f"{letter}{MARKS[verdict.status]}{number}", style=_style(verdict))


def _style(verdict: Verdict) -> str:
    """Blue for local, orange for remote: apart for every colour vision; bold where S is large."""
    if verdict.choice is Choice.UNDECIDED:
        return "dim"
    bold = verdict.s is not None and abs(verdict.s) > 0.3
    colour = "blue" if verdict.choice is Choice.LOCAL else "dark_orange"
    return f"bold {colour}" if bold else colour


def flips(table: Table) -> dict[str, Any]:
    """What :func:`heat_maps` says of r*, for every cell."""
    ratios = flip_ratios(table)
    cells = [
        {"topology": cell.topology, "workload": cell.workload, **cell.centre, "r_star": ratio}
        for cell, ratio in zip(table.cells, ratios, strict=True)
    ]
    return {
        "weight_ratio": weight_ratio(table.rule),
        "cells": cells,
        "next": [index for _, index in next_to_flip(table)],
    }


def _print_flips(out: Console, table: Table) -> None:
    now = weight_ratio(table.rule)
    if now is None:
        return
    out.print(f"local turns remote when w_tpot/w_ttft passes r* (now {now:g}); first:")
    for ratio, index in next_to_flip(table)[:FIRST_FLIPS]:
        cell = table.cells[index]
        out.print(f"  r* {ratio:7.2f}  {cell.topology} {describe(cell)}")


def regret_table(table: Table, report: Sequence[Regret]) -> None:
    """To stderr: stdout is the export's."""
    grid = Grid(title="What simpler policies lose, in S", title_justify="left", pad_edge=False)
    names = (
        "policy",
        "mean lost",
        "worst lost",
        "same route",
        "failed routes",
        "with those",
        "cells",
    )
    for name in names:
        grid.add_column(name, justify="left" if name == "policy" else "right")
    for row in report:
        setting = ", ".join(f"{name} {value:g}" for name, value in row.setting.items())
        grid.add_row(
            f"{row.policy} {setting}".rstrip(),
            f"{row.mean_s_lost:+.4f}",
            f"{row.worst_s_lost:+.3f}",
            "–" if row.agree is None else f"{row.agree:.1%}",
            str(row.infeasible),
            f"{row.mean_with_failures:+.4f}",
            str(row.cells),
        )
    out = console(stderr=True)
    if table.simulated:
        out.print(SIMULATED_NOTICE)
    out.print(grid)
