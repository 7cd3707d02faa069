"""The main job by its commands: sweep, table, simulated nodes, router, conversation, figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ppdbench.cluster.processes import free_ports

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
GRID = """
rates_per_s = [4]
duration_s = 4
[[arm]]
topologies = ["1P_1D"]
policies = ["remote", "local"]
[[workload]]
name = "paste"
turns = [[128, 16], [512, 16]]
"""


def run(*arguments: object) -> str:
    """The stdout of a command that did what it was asked for."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def ppd(*arguments: object) -> str:
    return run("-m", "ppdbench", *arguments)


@contextmanager
def router_of(*arguments: object):
    """``ppd serve`` for the length of the block."""
    argv = [sys.executable, "-m", "ppdbench", "serve", *map(str, arguments)]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)


def runs(pid: int) -> bool:
    """A dead process that nobody has waited for yet still has its pid."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_from_a_grid_to_a_routed_conversation(tmp_path):
    """Turn 1 goes remote and later turns as the table built from the sweep says; none is left."""
    (tmp_path / "grid.toml").write_text(GRID)
    table, state, port = tmp_path / "t.json", tmp_path / "state", free_ports(1)[0]

    ppd("sweep", "--grid", tmp_path / "grid.toml", "-o", tmp_path / "run")
    built = json.loads(
        ppd("build-table", tmp_path / "run", "--base", "1P_1D", "-o", table, "--json")
    )
    try:
        up = json.loads(
            ppd("cluster", "up", "1P_1D", "--backend", "sim", "--state", state, "--json")
        )
        with router_of("--table", table, "--cluster", state / "cluster.toml", "--port", port):
            shown = run("scripts/converse", "--url", f"http://127.0.0.1:{port}", "--turns", 3)
    finally:
        ppd("cluster", "down", "--state", state)
    ppd("plot", table, "-o", tmp_path / "figures")

    assert (built["local"], built["cells"]) == (1, 1)
    assert [line.split("│")[2].strip() for line in shown.splitlines() if "tok" in line] == [
        "remote", "local", "local",
    ]  # fmt: skip
    assert all(node["healthy"] for node in up["nodes"])
    assert not [node for node in up["nodes"] if runs(node["pid"])]
    assert (tmp_path / "figures" / "summary.json").is_file()
