"""Help is complete: every command and every group shows an example."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from ppdbench.cli.app import app


def commands(command, path: tuple[str, ...] = ("ppd",)) -> Iterator[tuple[str, object]]:
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ROOT = typer.main.get_command(app)


@pytest.mark.parametrize(("path", "command"), list(commands(ROOT)))
def test_every_help_says_what_it_does_and_shows_an_example(path, command):
    """A user who asks for help gets a line to copy, which starts with what was asked about."""
    said = f"{command.help}\n{command.epilog}"

    assert command.help
    assert f"Example: {path}" in said
