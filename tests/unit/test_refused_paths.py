"""What the system refuses about a path is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import errno
import os

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.cli.output import command


def ppd(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def refused(number: int, path: str | None):
    @command
    def run(*, debug: bool = False) -> None:
        raise OSError(number, os.strerror(number), path)

    return run


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EACCES, 2), (errno.EROFS, 2), (errno.ENOTDIR, 2), (errno.ENOSPC, 3), (errno.EMFILE, 3)],
)
def test_a_refused_path_is_named_in_one_sentence(number, code, capsys):
    """Exit 2 where another path helps, 3 where the machine is at its end."""
    with pytest.raises(SystemExit) as left:
        refused(number, "/there/it is")()
    said = capsys.readouterr().err
    assert left.value.code == code
    assert said.count("\n") == 1
    assert "/there/it is" in said
    assert os.strerror(number) in said


def test_a_fault_of_ours_and_debug_keep_their_traceback():
    """An error without a path is no answer to what a user named."""
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        refused(errno.EBADF, None)()
    with pytest.raises(OSError, match="it is"):
        refused(errno.EACCES, "it is")(debug=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster", "status", "--state", "FILE"),
        ("cluster", "up", "1P_1D", "--backend", "sim", "--state", "FILE"),
        ("cluster", "up", "1P_1D", "--backend", "sim", "--gpu", "abacus", "--state", "FOLDER"),
        ("cluster", "up", "1P_1D", "--backend", "sim", "--model", "abacus", "--state", "FOLDER"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_before_a_node_starts(arguments, tmp_path):
    """A state folder that is a file, a GPU or model that nobody knows: wrong use."""
    (tmp_path / "file").write_text("")
    places = {"FILE": tmp_path / "file", "FOLDER": tmp_path / "state"}
    result = ppd(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert not list(tmp_path.rglob("*.log"))
