"""``ppd cluster`` as a user runs it, on simulated nodes and in dry runs."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from ppdbench.cluster.processes import port_is_free


def ppd(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "ppdbench", "cluster", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def runs(node):
    """A zombie that init has not yet collected does not run."""
    try:
        return psutil.Process(node["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def up(tmp_path):
    """A simulated 1P_1D_1pD; down after the test whatever happened."""
    state = str(tmp_path / "state")
    yield (
        state,
        json.loads(ppd("up", "1P_1D_1pD", "--backend", "sim", "--state", state, "--json").stdout),
    )
    ppd("down", "--state", state)


@pytest.mark.slow
def test_up_leaves_healthy_nodes_and_down_leaves_nothing(up):
    """Processes, ports, state file and cluster file are gone after ``down``; logs stay."""
    state, document = up
    nodes = document["nodes"]
    assert [(n["name"], n["role"], n["healthy"]) for n in nodes] == [
        ("p0", "P", True), ("d0", "D", True), ("pd0", "pD", True),
    ]  # fmt: skip
    assert json.loads(ppd("status", "--state", state, "--json").stdout)["nodes"] == nodes

    ppd("down", "--state", state)

    assert not any(map(runs, nodes))
    assert all(port_is_free(int(n["url"].rsplit(":", 1)[1])) for n in nodes)
    ppd("status", "--state", state, code=1)


@pytest.mark.slow
def test_a_second_up_is_refused_and_a_dead_node_is_shown(up):
    """One cluster per state folder; what died is not healthy, the rest is."""
    state, document = up
    refused = ppd("up", "1R", "--backend", "sim", "--state", state, code=2)
    assert "is up already" in refused.stderr

    psutil.Process(document["nodes"][1]["pid"]).kill()

    after = json.loads(ppd("status", "--state", state, "--json").stdout)["nodes"]
    assert [n["healthy"] for n in after] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["up", "2X"], 2, "roles are P, D, pD and R"),
        (["up", "1P_1D"], 2, "--device cuda needs --model"),
        (["up", "1P_1D", "--device", "cpu", "--vllm", "/nowhere/python"], 3, "no such program"),
        (["up", "1P_1D", "--device", "cpu", "--vllm", "true"], 3, "has no vLLM"),
        (["up", "1R", "--backend", "slurm"], 2, "known: vllm, sim"),
        (["up", "4R", "--model", "m", "--gpus", "0,1", "--dry-run"], 2, "4 GPUs are needed"),
        (["status"], 1, "no cluster is up"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_an_exit_code(tmp_path, arguments, code, word):
    """No traceback; the value and the way out stand in it."""
    done = ppd(*arguments, "--state", str(tmp_path), code=code)

    assert word in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_down_without_a_cluster_is_no_error(tmp_path):
    """The wish is fulfilled already."""
    assert "no cluster is up" in ppd("down", "--state", str(tmp_path)).stderr
