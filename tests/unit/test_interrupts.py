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


INTERRUPTED_RUN = """
import asyncio, contextlib, sys, time
from ppdbench.cli.output import command
from ppdbench.experiments.microbench import bench, engines
from ppdbench.experiments.microbench.plan import Limits

@contextlib.contextmanager
def start_that_takes_long(*_):
    print("starting", flush=True)
    try:
        time.sleep(20)
        yield
    finally:
        print("stopped", flush=True)

@contextlib.asynccontextmanager
async def engine_that_runs(*_):
    print("starting", flush=True)
    try:
        yield Engine(), None
    finally:
        await asyncio.sleep(0.01)
        print("stopped", flush=True)

async def looked(*_):
    return Limits()

class Engine:
    async def run(self, script):
        await asyncio.sleep(20)

@command
def main():
    chosen = engines.Chosen("vllm")
    if sys.argv[1] == "start":
        engines.launch = start_that_takes_long
        bench.run_handoff(chosen, bench.HandoffPlan(), bench.Manner(print))
    else:
        bench.live_engine, bench.look = engine_that_runs, looked
        plan = bench.AttributionPlan((1,), 1)
        bench.run_attribution(chosen, plan, bench.Manner(lambda _: None))

main()
"""


@pytest.mark.parametrize("moment", ["start", "course"])
def test_ctrl_c_ends_a_live_micro_benchmark_at_once(moment):
    """While its engine starts, and in its course: 130, one line, and what it started is stopped."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_RUN, moment], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "starting\n":
            pass
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert shown == "stopped\n"
    assert said == "ppd: interrupted\n"


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
