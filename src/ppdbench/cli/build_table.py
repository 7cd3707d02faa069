"""``ppd build-table``: from runs to a decision table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ppdbench.cli.output import command, say, show, show_json

if TYPE_CHECKING:
    from ppdbench.table.build import Built

EPILOG = "Example: ppd build-table results/demo --base 2P_2D --w-ttft 1 --w-tpot 1 -o table.json"


@command
def build_table(
    *,
    runs: list[Path] = typer.Argument(..., metavar="RUN...", help="Run folders to pool."),
    output: Path = typer.Option(..., "-o", "--output", metavar="TABLE", help="The table's file."),
    base: list[str] = typer.Option(..., "--base", help="Topology to compare on, as 2P_2D."),
    w_ttft: float | None = typer.Option(
        None, "--w-ttft", help="Weight of the relative TTFT gain; 1 by default."
    ),
    w_tpot: float | None = typer.Option(
        None, "--w-tpot", help="Weight of the relative TPOT cost; 1 by default."
    ),
    stat: str = typer.Option("mean", "--stat", help="mean, p50, p90, p95 or p99."),
    min_success: float = typer.Option(
        0.95, "--min-success", help="Below it a route is infeasible; 0: only a total failure is."
    ),
    min_n: int = typer.Option(1, "--min-n", help="Fewest later turns a side needs."),
    undecided: str = typer.Option(
        "remote", "--undecided", help="Route of cells whose interval holds 0: remote or local."
    ),
    guard: str | None = typer.Option(
        None, "--guard", help="Veto on local, as tpot_p99=0.05 (seconds) or tpot_p99=1.2x."
    ),
    slo: str | None = typer.Option(
        None,
        "--slo",
        help="Instead of weights: the route that meets ttft=0.2,tpot=0.03 more often.",
    ),
    fill: bool = typer.Option(
        False, "--fill", help="Add missing cells whose measured neighbours agree: interpolated."
    ),
    max_distance: float | None = typer.Option(
        None, "--max-distance", help="Octaves outside the cells beyond which the default holds."
    ),
    json: bool = typer.Option(False, "--json", help="Print the counts as JSON on stdout."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),  # noqa: ARG001
) -> None:
    """Score local against remote in every measured cell and write the table."""
    from ppdbench.table.build import build_table as build
    from ppdbench.table.fill import fill as close_gaps
    from ppdbench.table.schema import counts, save_table
    from ppdbench.table.score import Guard, Rule, Slo, default_choice
    from ppdbench.table.sources import read_runs

    weights = {"w_ttft": w_ttft, "w_tpot": w_tpot}
    rule = Rule(
        **_weights(weights, limits=slo),
        stat=stat,
        min_success=min_success,
        min_n=min_n,
        undecided=default_choice(undecided),
        guard=None if guard is None else Guard.parse(guard),
        slo=None if slo is None else Slo.parse(slo),
        max_distance=max_distance,
    )
    built = build(read_runs(runs), base, rule)
    table = close_gaps(built.table) if fill else built.table
    save_table(table, output)
    _report(built, output)
    summary = {**counts(table), "digest": table.digest}
    if json:
        left_out = {name: len(getattr(built, name)) for name in ("unpaired", "thin", "doubled")}
        show_json({**summary, **left_out, "barred": dict(built.barred)})
    else:
        show("  ".join(f"{name} {value}" for name, value in summary.items()))


def _weights(given: dict[str, float | None], limits: str | None) -> dict[str, float]:
    from ppdbench.core.errors import UsageError

    weights = {name: value for name, value in given.items() if value is not None}
    if weights and limits is not None:
        raise UsageError("--slo decides instead of weights; give it, or --w-ttft and --w-tpot")
    return weights


def _report(built: Built, output: Path) -> None:
    from ppdbench.table.schema import SIMULATED_NOTICE

    if built.table.simulated:
        say(SIMULATED_NOTICE)
    if all(cell.replicates is None for cell in built.table.cells):
        say("no intervals: one repeat and no records, so the sign of S decides")
    for name, places in (("one side only", built.unpaired), ("too few samples", built.thin)):
        if places:
            workload, rate = places[0]
            say(f"left out, {name}: {len(places)} places, first {workload} at {rate:g}/s")
    if built.doubled:
        names = ", ".join(sorted({cell.workload for cell in built.doubled}))
        say(f"left out, same place as a better sampled cell: {len(built.doubled)} of {names}")
    for code, count in sorted(built.barred.items()):
        say(f"left out, {code}: {count} points, which may never vote")
    say(f"the table is {output}")
