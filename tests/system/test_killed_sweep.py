"""A sweep that is killed again and again ends with the bytes of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ppdbench.runs.store import read_points

POINTS = 200
KILLS = 10
GRID = """
rates_per_s = [1, 2, 3, 4, 5]
duration_s = 10
repeats = 10
[[arm]]
topologies = ["2P_2D"]
policies = ["remote", "local"]
[[workload]]
name = "small_mid_bal"
turns = [[128, 128], [128, 128]]
[[workload]]
name = "large_tiny"
turns = [[1024, 1024], [16, 32]]
"""


def start(grid: Path, run: Path, stderr: int = subprocess.DEVNULL) -> subprocess.Popen:
    command = [sys.executable, "-m", "ppdbench", "sweep", "--grid", str(grid), "--seed", "1"]
    return subprocess.Popen(
        [*command, "-o", str(run), "--resume", "--jobs", "2"],
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


def finished(run: Path) -> int:
    return len(list((run / "points").glob("*.json"))) if (run / "points").is_dir() else 0


def wait_for(process: subprocess.Popen, run: Path, points: int) -> None:
    deadline = time.monotonic() + 60
    while finished(run) < points:
        assert process.poll() is None, "the sweep ended before it could be stopped"
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.002)


def kill_after(process: subprocess.Popen, run: Path, more: int) -> list[psutil.Process]:
    """SIGKILL once ``more`` further points exist; the workers it leaves."""
    wait_for(process, run, finished(run) + more)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return workers


@pytest.mark.slow
def test_ten_kills_lose_and_double_nothing(tmp_path):
    """200 points, SIGKILL after some more each time, resumed: the same bytes, every point once."""
    grid = tmp_path / "grid.toml"
    grid.write_text(GRID)
    assert start(grid, tmp_path / "whole").wait(timeout=120) == 0
    run = tmp_path / "killed"

    leftovers, counts = [], []
    for round_number in range(KILLS):
        process = start(grid, run)
        leftovers += kill_after(process, run, more=3 + 4 * (round_number % 4))
        counts.append(finished(run))
    assert start(grid, run).wait(timeout=120) == 0

    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] < POINTS
    assert (run / "points.jsonl").read_bytes() == (tmp_path / "whole/points.jsonl").read_bytes()
    assert len(read_points(run)) == POINTS
    assert not list(run.rglob("*.part"))
    _, alive = psutil.wait_procs(leftovers, timeout=10)
    assert len(leftovers) >= 2 * KILLS
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_with_130_and_can_be_resumed(tmp_path, number):
    """What was finished is in points.jsonl, no worker stays, and the message names --resume."""
    grid, run = tmp_path / "grid.toml", tmp_path / "run"
    grid.write_text(GRID)
    process = start(grid, run, stderr=subprocess.PIPE)
    wait_for(process, run, 20)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=30)

    assert process.returncode == 130
    assert b"--resume" in said
    assert b"Traceback" not in said
    assert len(read_points(run)) == finished(run) >= 20
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert start(grid, run).wait(timeout=120) == 0
    assert len(read_points(run)) == POINTS
