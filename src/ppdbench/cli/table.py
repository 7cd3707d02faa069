"""``ppd table``: look at a table, compare, reweight, export, plan the next measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ppdbench.cli.output import command, say, show, show_json

if TYPE_CHECKING:
    from ppdbench.experiments.next_grid import Traffic
    from ppdbench.table.compare import Difference
    from ppdbench.table.regret import Regret
    from ppdbench.table.schema import Table

app = typer.Typer(
    no_args_is_help=True,
    help="Look at, compare, reweight and export tables.",
    epilog="Example: ppd table show t.json",
)

TABLE = typer.Argument(..., metavar="TABLE", help="A table that ppd build-table wrote.")
JSON = typer.Option(False, "--json", help="Print one JSON document on stdout.")
DEBUG = typer.Option(False, "--debug", help="Show tracebacks.")


@app.command("show", epilog="Example: ppd table show table.json")
@command
def show_table(
    *,
    path: Path = TABLE,
    json: bool = JSON,
    debug: bool = DEBUG,  # noqa: ARG001
) -> None:
    """A heat map of S per topology, and the cells that flip first when TPOT weighs more."""
    from ppdbench.cli.table_view import flips, heat_maps, summary
    from ppdbench.table.schema import load_table, to_document

    table = load_table(path)
    if json:
        document = {"summary": summary(table), "table": to_document(table), "flips": flips(table)}
        show_json(document)
    else:
        heat_maps(table)


@app.command("check", epilog="Example: ppd table check table.json")
@command
def check(
    *,
    path: Path = TABLE,
    json: bool = JSON,
    debug: bool = DEBUG,  # noqa: ARG001
) -> None:
    """Schema, digest and figures hold (else exit 2); what a careful reader should know."""
    from ppdbench.cli.table_view import summary
    from ppdbench.table.compare import check as look
    from ppdbench.table.schema import load_table

    table = load_table(path)
    found = look(table)
    if json:
        show_json({**summary(table), "warnings": found.sentences, "flips": found.flips})
        return
    show(f"{path}: sound, {table.digest}")
    for sentence in [*found.sentences, *found.flips]:
        show(f"note: {sentence}")


@app.command("diff", epilog="Example: ppd table diff old.json new.json")
@command
def diff(
    *,
    first: Path = TABLE,
    second: Path = TABLE,
    json: bool = JSON,
    debug: bool = DEBUG,  # noqa: ARG001
) -> None:
    """Cells whose decision differs between two tables, and why."""
    from ppdbench.table.compare import diff as compare
    from ppdbench.table.schema import load_table

    tables = load_table(first), load_table(second)
    document = _difference(compare(*tables))
    for path, table in zip((first, second), tables, strict=True):
        _say_simulated(table, f"{path}: ")
    if json:
        show_json(document)
    else:
        _show_difference(document)


def _say_simulated(table: Table, where: str = "") -> None:
    from ppdbench.table.schema import SIMULATED_NOTICE

    if table.simulated:
        say(where + SIMULATED_NOTICE)


def _difference(found: Difference) -> dict[str, Any]:
    from ppdbench.table.schema import describe

    return {
        "changed": [
            {
                "cell": describe(change.cell),
                "topology": change.cell.topology,
                "before": change.before.choice.value,
                "after": change.after.choice.value,
                "status_before": change.before.status.value,
                "status_after": change.after.status.value,
                "s_before": change.before.s,
                "s_after": change.after.s,
                "why": change.why,
            }
            for change in found.changed
        ],
        "only_first": [describe(cell) for cell in found.only_first],
        "only_second": [describe(cell) for cell in found.only_second],
        "rule": {name: [str(a), str(b)] for name, (a, b) in found.rule.items()},
        "provenance": {name: [str(a), str(b)] for name, (a, b) in found.provenance.items()},
    }


def _show_difference(document: dict[str, Any]) -> None:
    for part in ("rule", "provenance"):
        for name, (before, after) in document[part].items():
            show(f"{part} {name}: {before} → {after}")
    for change in document["changed"]:
        show(
            f"{change['topology']} {change['cell']}: {change['before']} → {change['after']} "
            f"(S {_number(change['s_before'])} → {_number(change['s_after'])}; {change['why']})"
        )
    sizes = ", ".join(f"{len(document[n])} {n}" for n in ("changed", "only_first", "only_second"))
    show(sizes)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


@app.command("reweight", epilog="Example: ppd table reweight table.json --w-tpot 6 -o strict.json")
@command
def reweight(
    *,
    path: Path = TABLE,
    output: Path = typer.Option(..., "-o", "--output", metavar="TABLE", help="The new table."),
    w_ttft: float | None = typer.Option(None, help="New weight of the TTFT gain."),
    w_tpot: float | None = typer.Option(None, help="New weight of the TPOT cost."),
    undecided: str | None = typer.Option(None, help="New default: remote or local."),
    guard: str | None = typer.Option(None, help="New veto, as tpot_p99=0.05 or tpot_p99=1.2x."),
    json: bool = JSON,
    debug: bool = DEBUG,  # noqa: ARG001
) -> None:
    """The same measurements under other weights; no run is needed."""
    from dataclasses import replace

    from ppdbench.cli.table_view import summary
    from ppdbench.core.errors import UsageError
    from ppdbench.table.fill import reweight as weigh
    from ppdbench.table.schema import load_table, save_table
    from ppdbench.table.score import Guard, default_choice

    table = load_table(path)
    if table.rule.slo is not None and (w_ttft is not None or w_tpot is not None):
        raise UsageError("the table decides by limits, not by weights; build one without --slo")
    given: dict[str, Any] = {
        "w_ttft": w_ttft,
        "w_tpot": w_tpot,
        "undecided": None if undecided is None else default_choice(undecided),
        "guard": None if guard is None else Guard.parse(guard),
    }
    changes = {name: value for name, value in given.items() if value is not None}
    other = weigh(table, replace(table.rule, **changes))
    save_table(other, output)
    _say_simulated(other)
    say(f"the table is {output}")
    _show_counts(summary(other), json=json)


def _show_counts(counts: dict[str, Any], *, json: bool) -> None:
    if json:
        show_json(counts)
    else:
        show("  ".join(f"{name} {value}" for name, value in counts.items()))


@app.command("export", epilog="Example: ppd table export table.json --to llm-d -o epp.yaml")
@command
def export(
    *,
    path: Path = TABLE,
    to: str = typer.Option(..., "--to", help="vllm-router, dynamo or llm-d."),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="FILE", help="Where it goes; stdout without it."
    ),
    rate: float | None = typer.Option(
        None, "--rate", help="vllm-router: conversations per second whose cells are exported."
    ),
    tpot_limit: float | None = typer.Option(
        None, "--tpot-limit", help="vllm-router: p95 TPOT in seconds above which local is refused."
    ),
    profile: str | None = typer.Option(
        None, help="vllm-router: the profile your engines report; ppd by default."
    ),
    fresh: Path | None = typer.Option(
        None,
        "--fresh",
        metavar="TABLE",
        help="A table of other runs: its figures score the choices, so nothing is in-sample.",
    ),
    json: bool = JSON,
    debug: bool = DEBUG,  # noqa: ARG001
) -> None:
    """The table in another router's format, and what each simplification loses."""
    from dataclasses import asdict

    from ppdbench.table.export import VllmRouterOptions
    from ppdbench.table.export import export as make
    from ppdbench.table.regret import held_out, regrets
    from ppdbench.table.schema import load_table

    table = load_table(path)
    given = {"profile": profile, "rate_per_s": rate, "tpot_limit_s": tpot_limit}
    options = {name: value for name, value in given.items() if value is not None}
    made = make(table, to, VllmRouterOptions(**options) if options else None)  # type: ignore[arg-type]
    if fresh:
        report = held_out(table, load_table(fresh))
    else:
        report = [made.regret, *(r for r in regrets(table) if r.policy != made.regret.policy)]
    if output:
        _write(output, made.text)
    if json:
        show_json(
            {
                "to": to,
                "export": made.text,
                "notes": list(made.notes),
                "regret": [asdict(regret) for regret in report],
                "in_sample": fresh is None,
                "simulated": table.simulated,
            }
        )
        return
    if not output:
        show(made.text.rstrip())
    for note in made.notes:
        say(f"note: {note}")
    if fresh is None:
        say("note: in-sample: the figures that chose also score; --fresh takes those of other runs")
    _show_regret(table, report)


def _write(path: Path, text: str) -> None:
    from ppdbench.core.errors import UsageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another -o") from error


def _show_regret(table: Table, report: Sequence[Regret]) -> None:
    from ppdbench.cli.table_view import regret_table

    regret_table(table, report)


@app.command("plan", epilog="Example: ppd table plan table.json --budget 30m -o next.toml")
@command
def plan(
    *,
    path: Path = TABLE,
    budget: str = typer.Option(..., "--budget", help="Time to measure in, as 90s, 30m or 2h."),
    base: str | None = typer.Option(
        None, "--base", help="Topology to measure, where the table holds several."
    ),
    grid: str | None = typer.Option(
        None, "--grid", help="Grid the table was measured with; known for shipped grids."
    ),
    traffic: str | None = typer.Option(
        None, "--traffic", help="Grid whose conversations weigh the cells; all weigh the same."
    ),
    output: Path | None = typer.Option(
        None, "-o", "--output", metavar="GRID", help="The grid file; stdout without it."
    ),
    json: bool = JSON,
    debug: bool = DEBUG,  # noqa: ARG001
) -> None:
    """What to measure next: the places most likely to change a decision that matters."""
    from dataclasses import asdict

    from ppdbench.experiments import next_grid
    from ppdbench.experiments.grid import load_grid
    from ppdbench.table.lookup import Lookup
    from ppdbench.table.plan import worths
    from ppdbench.table.schema import load_table

    table = load_table(path)
    _say_simulated(table)
    base = _base_of(table, base)
    source = _grid_of(table) if grid is None else grid
    known = load_grid(source)
    met = None if traffic is None else next_grid.traffic_of(load_grid(traffic), Lookup(table, base))
    found = worths(table, base, None if met is None else met.turns)
    chosen = next_grid.affordable(found, known, _seconds(budget))
    text = next_grid.grid_text(source, base, chosen, next_grid.repeats(known))
    if output:
        _write(output, text)
        say(f"the grid is {output}")
    expected_s = next_grid.place_s(known) * len(chosen)
    if json:
        places = [asdict(place) for place in chosen]
        weighed = None if met is None else _met(met)
        show_json({"grid": text, "places": places, "expected_s": expected_s, "traffic": weighed})
        return
    if met is not None:
        say(
            "traffic of {grid}: {later_turns} later turns look up {cells} cells; {outside} are "
            "outside the measured range, {too_far} too far to count".format_map(_met(met))
        )
    for place in chosen:
        say(f"{place.workload} at {place.rate_per_s:g}/s: value {place.value:.2g} S")
    say(f"{len(chosen)} places on both routes, about {expected_s:g} s")
    if not output:
        show(text.rstrip())


def _met(traffic: Traffic) -> dict[str, Any]:
    return {
        "grid": traffic.grid,
        "later_turns": traffic.later_turns,
        "cells": len(traffic.turns),
        "outside": traffic.outside,
        "too_far": traffic.too_far,
    }


def _base_of(table: Table, wanted: str | None) -> str:
    from ppdbench.core.errors import UsageError

    held = table.topologies
    if wanted is None and len(held) == 1:
        return held[0]
    if wanted not in held:
        raise UsageError(
            f"--base {wanted or '(not given)'}: the table holds {', '.join(held)}; "
            "say which of them to measure"
        )
    return wanted


def _grid_of(table: Table) -> str:
    from ppdbench.core.errors import UsageError

    grids = [name for name in table.provenance.get("grids", ()) if name]
    if len(grids) != 1:
        raise UsageError(
            f"the table comes from the grids {', '.join(grids) or '(unknown)'}; "
            "say which to go on with as --grid"
        )
    return str(grids[0])


def _seconds(text: str) -> float:
    from ppdbench.core.errors import UsageError

    units = {"s": 1, "m": 60, "h": 3600}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--budget {text!r}: expected a time as 90s, 30m or 2h")
    return seconds
