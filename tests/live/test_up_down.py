"""``ppd cluster up`` and ``down`` with real vLLM, four nodes at a time."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from tests.live import machine

MEMORY_LIMIT_GIB = 12


def ppd(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "ppdbench", "cluster", *arguments],
        capture_output=True, text=True, timeout=700, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "topology",
    [
        "1P_3D",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("2P_2D", "4R", "2P_1D_1pD")),
    ],
)
def test_up_gives_four_healthy_nodes_and_down_leaves_nothing(
    engine_python, tmp_path, topology, record_property
):
    """No process, port, shared memory or state file outlives ``down``; four fit into 12 GiB.

    Idle they leave the cores to others, or they would starve each other as soon as one works.
    """
    state = ["--state", str(tmp_path / "state"), "--json"]
    begun = time.monotonic()
    nodes = ppd("up", topology, "--device", "cpu", *state)["nodes"]
    ready_s = time.monotonic() - begun
    try:
        running = machine.members({node["pid"] for node in nodes})
        memory = machine.memory_gib(running)
        held_ports, held_memory = machine.ports(running), machine.shared_memory(running)
        assert [n["healthy"] for n in ppd("status", *state)["nodes"]] == [True] * 4
        time.sleep(2)
        idle_cores = machine.cores_used(running, over_s=5)
    finally:
        ppd("down", *state)

    print(
        f"{topology}: ready after {ready_s:.0f} s, {memory:.1f} GiB, {len(running)} processes, "
        f"idle on {idle_cores:.2f} cores"
    )
    assert len(running) > 4
    assert memory < MEMORY_LIMIT_GIB
    assert idle_cores < 1
    assert len(held_ports) >= 4
    assert not [process for process in running if machine.runs(process)]
    assert not held_ports & machine.all_ports()
    assert held_memory
    assert not [file for file in held_memory if file.exists()]
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["logs"]
