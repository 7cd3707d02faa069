"""``ppd plot``: figures of a run or a table."""

from __future__ import annotations

from pathlib import Path

import typer

from ppdbench.cli.output import command, say, show_json

EPILOG = "Example: ppd plot results/demo -o figures"


@command
def plot(
    source: Path = typer.Argument(
        ..., metavar="RUN-or-TABLE", help="A run folder or a table file."
    ),
    output: Path = typer.Option(..., "-o", "--output", metavar="DIR", help="Where PNGs go."),
    json: bool = typer.Option(False, "--json", help="Print the summary as JSON on stdout."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),  # noqa: ARG001
) -> None:
    """Draw a run or a table: PNG files and summary.json, straight into DIR."""
    from ppdbench.plots.draw import draw

    summary = draw(source, output)
    say(f"{len(summary['figures'])} figures and summary.json are in {output}")
    if json:
        show_json(summary)
