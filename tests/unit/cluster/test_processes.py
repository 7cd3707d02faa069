"""Real processes; each test ends what it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from ppdbench.cluster.guard import Guard
from ppdbench.cluster.processes import (
    Started,
    free_ports,
    port_is_free,
    start,
    started,
    stop,
)
from ppdbench.cluster.vllm_args import NodeCommand
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import NodeSpec, Role

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
WITH_CHILD = ["/bin/sh", "-c", "sleep 60 & sleep 60"]
STUBBORN = ["/bin/sh", "-c", "trap '' TERM; while true; do sleep 0.1; done"]


def eventually(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def command(argv, name="r0"):
    return NodeCommand(NodeSpec(name, Role.R), "http://127.0.0.1:1", tuple(argv), {})


@pytest.fixture
def launched(tmp_path):
    """Start a program in its session; it is gone after the test whatever happened."""
    running = []

    def begin(argv):
        child = start(argv, {}, tmp_path / "log")
        running.append((child, started(child.pid)))
        return running[-1]

    yield begin
    for child, _ in running:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_stopping_ends_the_leader_and_what_it_started(launched):
    """The engine's children go with it."""
    child, leader = launched(WITH_CHILD)
    assert eventually(lambda: len(psutil.Process(child.pid).children()) == 2)
    children = psutil.Process(child.pid).children()

    stop([leader], grace_s=5.0)

    assert not leader.alive()
    assert eventually(lambda: not any(c.is_running() for c in children))


def test_a_program_that_ignores_sigterm_is_killed(launched):
    """After the grace it has no choice."""
    child, leader = launched(STUBBORN)
    time.sleep(0.2)

    stop([leader], grace_s=0.3)

    assert child.wait(timeout=5) == -signal.SIGKILL


@pytest.mark.slow
def test_children_of_a_dead_leader_are_ended_too(launched):
    """An engine that crashed leaves workers; they are in its session."""
    child, leader = launched(WITH_CHILD)
    assert eventually(lambda: len(psutil.Process(child.pid).children()) == 2)
    orphans = psutil.Process(child.pid).children()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()

    stop([leader], grace_s=1.0)

    assert eventually(lambda: not any(o.is_running() for o in orphans))


def test_a_stranger_with_the_same_pid_is_left_alone(launched):
    """A pid alone is not an identity: the start must match too."""
    child, leader = launched(SLEEP)
    stale = Started(leader.pid, leader.start_ticks - 1000)

    stop([stale], grace_s=0.2)

    assert not stale.alive()
    assert child.poll() is None


def test_a_program_that_is_not_there_is_an_error_with_advice(tmp_path):
    """Said before anything waits for it."""
    with pytest.raises(EngineError, match="scripts/engine"):
        start(["/nowhere/python"], {}, tmp_path / "log")


def test_free_ports_are_different_and_free():
    """Each can be bound."""
    ports = free_ports(20)

    assert len(set(ports)) == 20
    assert all(map(port_is_free, ports))


def test_a_taken_port_is_not_free():
    """Somebody listens on it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not port_is_free(server.getsockname()[1])


def test_the_guard_reports_how_a_node_ended(tmp_path):
    """An exit code, or minus the signal; ``None`` while it runs."""
    guard = Guard()
    try:
        ended = guard.start(command([sys.executable, "-c", "raise SystemExit(7)"]), tmp_path / "a")
        running = guard.start(command(SLEEP), tmp_path / "b")
        assert eventually(lambda: guard.exit_code(ended) == 7)
        assert guard.exit_code(running) is None
    finally:
        guard.close()
    assert not running.alive()


def test_a_node_that_cannot_start_is_an_error_of_the_guards_owner(tmp_path):
    """It crosses the pipe as the same sentence."""
    guard = Guard()
    try:
        with pytest.raises(EngineError, match="cannot start"):
            guard.start(command(["/nowhere/python"]), tmp_path / "log")
    finally:
        guard.close()


def test_an_owner_ends_its_nodes_itself_when_the_guard_was_killed(tmp_path):
    """Nothing is left to luck between the two."""
    guard = Guard()
    node = guard.start(command(SLEEP), tmp_path / "log")
    psutil.Process(node.pid).parent().kill()

    guard.stop([node], grace_s=2.0)
    guard.close()

    assert not node.alive()


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from ppdbench.cluster.guard import Guard
from ppdbench.cluster.vllm_args import NodeCommand
from ppdbench.core.topology import NodeSpec, Role
guard = Guard()
spec = NodeCommand(NodeSpec("r0", Role.R), "http://127.0.0.1:1", tuple({argv!r}), {{}})
node = guard.start(spec, Path({log!r}))
if {detach}: guard.detach()
print(node.pid, node.start_ticks, flush=True)
time.sleep({linger})
"""


def owner(tmp_path, argv, *, detach=False, linger=60):
    code = OWNER.format(tests=str(tmp_path), argv=argv, log=str(tmp_path / "log"), detach=detach,
                        linger=linger)  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, ticks = process.stdout.readline().split()
    return process, Started(int(pid), int(ticks))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nodes_die_with_their_owner_however_it_ends(tmp_path, number):
    """Even kill -9 leaves nothing, the node's children included."""
    process, node = owner(tmp_path, WITH_CHILD)
    assert eventually(lambda: len(psutil.Process(node.pid).children()) == 2)
    children = psutil.Process(node.pid).children()

    process.send_signal(number)
    process.wait(timeout=10)
    process.stdout.close()

    assert eventually(lambda: not node.alive())
    assert eventually(lambda: not any(c.is_running() for c in children))


def test_detached_nodes_outlive_their_owner(tmp_path):
    """That is what ``ppd cluster up`` is for; ``stop`` then ends them by their identity."""
    process, node = owner(tmp_path, SLEEP, detach=True, linger=0)
    process.wait(timeout=10)
    process.stdout.close()
    try:
        assert node.alive()
    finally:
        stop([node], grace_s=2.0)
    assert not node.alive()


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_LIBRARY_PATH"])
def test_a_nodes_search_path_stands_before_the_callers(tmp_path, monkeypatch, name):
    """A node's own folders must not hide what the user has there."""
    monkeypatch.setenv(name, "/theirs")
    log = tmp_path / "log"
    child = start(
        [sys.executable, "-c", f"import os; print(os.environ['{name}'])"],
        {name: "/ours"}, log,
    )  # fmt: skip

    assert child.wait(30) == 0
    assert log.read_text().strip() == f"/ours{os.pathsep}/theirs"
