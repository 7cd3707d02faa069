"""A micro-benchmark's document as tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ppdbench.cli.output import show

Document = Mapping[str, Any]

WIDE = 140
"""Where no terminal sets a width, no interval is cut."""


def show_document(document: Document) -> None:
    """Rows, then controls where there are any, then what is thin, then the finding in words."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    handoff = document["protocol"] == "handoff"
    console.print(_hops(document) if handoff else _rows(document))
    if document["protocol"] == "paper":
        console.print(_controls(document))
    for line in shortfalls(document):
        show(line)
    show(document["finding"])


def shortfalls(document: Document) -> Iterator[str]:
    """What the rows rest on, where that is less than was asked for."""
    asked = document["plan"]["repeats"]
    fewer = [row["repeats"] for row in document["rows"] if row["repeats"] < asked]
    if fewer:
        yield (
            f"{len(fewer)} of {len(document['rows'])} rows have fewer than the {asked} repeats "
            f"asked for: {min(fewer)} to {max(fewer)}, as the column says. The rest was cut off by "
            "the time limit, or not measured whole."
        )
    if other := sum(_is_cached_otherwise(row) for row in document["rows"]):
        yield f"{other} rows rest on prompts of which other than the stated context was cached."
    for name, what in LEFT_OUT.items():
        if document.get(name):
            yield f"{what}: {document[name]}."


def _is_cached_otherwise(row: Document) -> bool:
    """By the server's count; interference and the published test leave such doses out before."""
    counts = {row.get("cached_tokens_min"), row.get("cached_tokens_max")} - {None}
    return row.get("way") is not None and counts not in (set(), {row["context_tokens"]})


LEFT_OUT = {
    "cells_without_rows": "Cells without a row, because no repeat of them was measured",
    "unmeasured_doses": "Doses that do not count, because their window was not whole",
    "unproven_doses": "Doses that do not count, because they were not cached as they claim",
    "failed_shots": "Shots that do not count, because a request failed",
    "unproven_shots": "Shots that do not count, because they were not cached as they claim",
    "unproven_points": "Points that do not count, because they did not take the way they claim",
    "left_out_points": "Points left out when the time limit was reached",
    "left_out_shots": "Shots left out when the time limit was reached",
    "failed_turns": "Turns that failed and do not count",
}


def _repeats(row: Document, document: Document) -> str:
    asked = document["plan"]["repeats"]
    return f"{row['repeats']}" if row["repeats"] >= asked else f"{row['repeats']} of {asked}"


def _title(document: Document, what: str) -> str:
    kind = "SIMULATED" if document["simulated"] else "measured"
    return f"{what}, {kind}: {document['model']} on {document['gpu'] or 'its engine'}"


def _table(*names: str, title: str) -> Table:
    """Columns that fold where the terminal is narrow: an ellipsis would swallow digits."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _rows(document: Document) -> Table:
    first = ("form", "N") if document["protocol"] == "paper" else ()
    table = _table(
        *first, "kind", "batch", "context", "new", "slowdown", "95 %", "TPOT ms", "p99 gap ms",
        "largest ms", "TTFT ms", "repeats", title=_title(document, "Decode slowdown"),
    )  # fmt: skip
    for row in document["rows"]:
        lead = [row["form"], str(row["injected"])] if first else []
        table.add_row(*lead, *_cells(row), _repeats(row, document))
    return table


def _cells(row: Document) -> list[str]:
    milliseconds = ("tpot_dosed_s", "itl_p99_s", "max_gap_s", "injected_ttft_s")
    return [
        row["kind"],
        str(row["batch"]),
        f"{row['context_tokens']:,}",
        f"{row['new_tokens']:,}",
        f"{row['slowdown_mean']:+.1%}",
        _interval(row["slowdown_ci"]),
        *("–" if row[name] is None else f"{row[name] * 1e3:.1f}" for name in milliseconds),
    ]


def _hops(document: Document) -> Table:
    table = _table(
        "way", "decodes", "prompt", "cached", "TTFT ms", "95 %", "repeats",
        title=_title(document, "Time to first token"),
    )  # fmt: skip
    for row in document["rows"]:
        bounds = row["ttft_ci"]
        table.add_row(
            row["way"].replace("_", " "),
            f"{row['running_mean']:.1f}",
            f"{row['prompt_tokens']:,}",
            f"{row['context_tokens']:,}",
            f"{row['ttft_s'] * 1e3:.1f}",
            "–" if bounds is None else f"{bounds[0] * 1e3:.1f} … {bounds[1] * 1e3:.1f}",
            _repeats(row, document),
        )
    return table


def _controls(document: Document) -> Table:
    table = _table(
        "control", "of", "gap", "gap left", "removes", "95 %",
        title=_title(document, "What each control removes of full − append"),
    )  # fmt: skip
    for row in document["controls"]:
        name = row["control"].replace("_", " ")
        if row["removed"] is None:
            table.add_row(name, row["of"], "", "", row["reason"], "")
        else:
            shares = [f"{row[key]:.1%}" for key in ("gap_before", "gap", "removed")]
            table.add_row(name, row["of"], *shares, _interval(row["removed_ci"]))
    return table


def _interval(bounds: list[float] | None) -> str:
    return "–" if bounds is None else f"{bounds[0]:+.1%} … {bounds[1]:+.1%}"
