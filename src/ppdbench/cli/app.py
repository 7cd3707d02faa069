"""The ``ppd`` command. Each command module is imported only when it is asked for.

Typer needs the modules to print ``--help``, so they import nothing heavy at the top.
"""

from __future__ import annotations

import typer

from ppdbench import __version__
from ppdbench.cli import (
    build_table,
    cluster,
    doctor,
    import_,
    microbench,
    plot,
    run,
    serve,
    sweep,
    table,
)
from ppdbench.cli.output import show
from ppdbench.cli.workload import workload

app = typer.Typer(
    name="ppd",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure, decide and route append-prefill on prefill/decode-disaggregated vLLM.",
    epilog="Example: ppd sweep --grid demo -o run",
)


def _version(*, value: bool) -> None:
    if value:
        show(f"ppd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


app.command(epilog=sweep.EPILOG)(sweep.sweep)
app.command(epilog=plot.EPILOG)(plot.plot)
app.command(epilog=build_table.EPILOG)(build_table.build_table)
app.add_typer(cluster.app, name="cluster")
app.add_typer(import_.app, name="import")
app.add_typer(table.app, name="table")
app.add_typer(run.app, name="run")
app.command(epilog=serve.EPILOG)(serve.serve)
app.add_typer(workload, name="workload")
app.command(epilog=microbench.EPILOG)(microbench.microbench)
app.command(epilog=doctor.EPILOG)(doctor.doctor)


def main() -> None:
    app()
