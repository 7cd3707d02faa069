"""``ppd import``: other people's results as a run."""

from __future__ import annotations

from pathlib import Path

import typer

from ppdbench.cli.output import command, say, show, show_json

EPILOG = "Example: ppd import vllm-ppd vllm-ppd-sweep-2026-01 -o results/authors"


app = typer.Typer(
    no_args_is_help=True,
    help="Read other people's results as a run.",
    epilog="Example: ppd import vllm-ppd SWEEP -o authors",
)


@app.callback()
def _import() -> None:
    pass


@app.command("vllm-ppd", epilog=EPILOG)
@command
def vllm_ppd(
    *,
    folder: Path = typer.Argument(..., metavar="DIR", help="Folder of CONFIG/*.json files."),
    output: Path = typer.Option(..., "-o", "--output", metavar="RUN", help="The new run folder."),
    model: str | None = typer.Option(None, help="Model served, when you know it."),
    gpu: str | None = typer.Option(None, help="GPU it ran on, when you know it."),
    json: bool = typer.Option(False, "--json", help="Print the counts as JSON on stdout."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),  # noqa: ARG001
) -> None:
    """Import the result folders of the PPD authors' harness."""
    from ppdbench.runs import importers

    imported = importers.vllm_ppd(folder)
    importers.write_imported(imported, output, model=model, gpu=gpu)
    if imported.missing:
        say(f"{len(imported.missing)} points of the full grid are missing: {imported.missing[0]} …")
    say(f"the run is {output}")
    counts = {
        "points": len(imported.points),
        "below_95": imported.below_95,
        "missing": len(imported.missing),
    }
    if json:
        show_json({"run": str(output), **counts})
    else:
        show("  ".join(f"{name} {value}" for name, value in counts.items()))
