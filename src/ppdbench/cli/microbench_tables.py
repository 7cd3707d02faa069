"""A micro-benchmark's document as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ppdbench.cli.output import show

Document = Mapping[str, Any]


def show_document(document: Document) -> None:
    """Rows, then controls where there are any, then the finding in words."""
    console = Console()
    handoff = document["protocol"] == "handoff"
    console.print(_hops(document) if handoff else _rows(document))
    if document["protocol"] == "paper":
        console.print(_controls(document))
    show(document["finding"])


def _title(document: Document, what: str) -> str:
    kind = "SIMULATED" if document["simulated"] else "measured"
    return f"{what}, {kind}: {document['model']} on {document['gpu'] or 'its engine'}"


def _rows(document: Document) -> Table:
    first = ("form", "N") if document["protocol"] == "paper" else ()
    table = Table(
        *first, "kind", "batch", "context", "new", "slowdown", "95 %", "TPOT ms", "p99 gap ms",
        "largest ms", "TTFT ms", title=_title(document, "Decode slowdown"),
    )  # fmt: skip
    for row in document["rows"]:
        lead = [row["form"], str(row["injected"])] if first else []
        table.add_row(*lead, *_cells(row))
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
    table = Table(
        "way", "decodes", "prompt", "cached", "TTFT ms", "95 %",
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
        )
    return table


def _controls(document: Document) -> Table:
    table = Table(
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
