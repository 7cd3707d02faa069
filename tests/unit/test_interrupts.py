"""Ctrl-C or SIGTERM is exit code 130 and a sentence that is true of the command it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.cli.output import command, if_interrupted
from ppdbench.experiments.microbench import bench


@command
def stopped_anywhere() -> None:
    raise KeyboardInterrupt


@command
def terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


@command
def stopped_in_its_work() -> None:
    with if_interrupted("half is there"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (stopped_anywhere, "ppd: interrupted\n"),
        (terminated, "ppd: interrupted\n"),
        (stopped_in_its_work, "ppd: interrupted; half is there\n"),
    ],
)
def test_only_work_that_leaves_something_speaks_of_it(run, said, capsys):
    """Most commands leave nothing behind and say no more than that they were interrupted."""
    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == 130
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupted_micro_benchmark_says_that_nothing_was_kept(monkeypatch, tmp_path):
    """It has no resume, so none is promised; no result folder is there."""

    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_interference", interrupted)
    result = CliRunner().invoke(app, ["microbench", "-o", str(tmp_path / "run")])
    assert result.exit_code == 130
    assert "no measurement was kept" in result.stderr
    assert "resume" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_leaves_no_node(tmp_path, number):
    """What `cluster up` says then is so: no process, no state."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ppdbench", "cluster", "up", "2R", "--backend", "sim",
         "--state", str(tmp_path)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("starting 2 nodes")
        begun = psutil.Process(process.pid)
        while len(nodes := begun.children(recursive=True)) < 2:
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.endswith("ppd: interrupted; no node that was started stays up\n")
    assert not psutil.wait_procs(nodes, timeout=10)[1]
    assert not list(tmp_path.rglob("cluster.toml"))
