"""Nodes that die, stall or never start, with real vLLM."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time

import pytest
import uvloop
from tests.live import machine

from ppdbench.cluster.canary import check_canaries
from ppdbench.cluster.launch import (
    LaunchOptions,
    launch,
    launch_commands,
    vllm_commands,
)
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import Topology
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.parse import parse_policy
from ppdbench.runs.records import Outcome

CPU = LaunchOptions(device=Device.CPU, lease_s=12)
TURNS_BEFORE_A_FAULT = 2


@pytest.fixture(scope="module")
def cluster_of_its_own(engine_python, tmp_path_factory):
    with launch(Topology.parse("1P_1D"), CPU, tmp_path_factory.mktemp("victim")) as cluster:
        yield cluster


@pytest.fixture
def victim(cluster_of_its_own):
    """A 1P_1D that may be broken; started anew when an earlier test left it so."""
    if not cluster_of_its_own.processes or cluster_of_its_own.dead():
        cluster_of_its_own.restart()
    return cluster_of_its_own


def play(cluster, seconds, fault, **turns):
    """Two conversations a second, remote; the records.

    ``fault`` happens in another thread as soon as some turns have ended, which is mid-run however
    slow the machine is.
    """
    plan = (Turn(200, 16), Turn(40, 16))
    arrivals = [Arrival(i / 2, Conversation(f"c{i}", plan)) for i in range(2 * seconds)]
    thread = threading.Thread(target=fault)

    def watch(sent, out):
        if thread.ident is None and sent - out >= TURNS_BEFORE_A_FAULT:
            thread.start()

    live = LiveSettings(TurnSettings("tiny-llama", **turns), on_progress=watch)
    policy = parse_policy("remote")
    records = uvloop.run(run_live_point(cluster.spec, policy, arrivals, 2.0, live, 1)).records
    assert thread.ident is not None, "the run ended before the fault"
    thread.join()
    return records


@pytest.mark.full
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_node_killed_in_mid_run_ends_its_turns_and_can_be_started_again(victim, name):
    """The run ends by itself, the death is named, nothing of the node stays, a restart serves."""
    leader = victim.processes[name]
    family = machine.members({leader.pid})

    records = play(
        victim, 8, lambda: os.kill(leader.pid, signal.SIGKILL), first_byte_timeout_s=10.0
    )

    assert any(record.ok for record in records)
    assert {r.outcome for r in records if not r.ok} <= {
        Outcome.REFUSED, Outcome.BROKEN_STREAM, Outcome.NO_FIRST_BYTE, Outcome.UPSTREAM_STATUS,
    }  # fmt: skip
    assert any(not record.ok for record in records)
    assert "signal 9" in victim.dead()[name]
    assert victim.health()[name] is False

    victim.restart()

    assert victim.health() == {"p0": True, "d0": True}
    assert not [process for process in family if machine.runs(process)]
    assert check_canaries(victim.spec, "tiny-llama") == []


@pytest.mark.full
def test_a_d_that_stalls_for_half_a_minute_costs_its_turns_and_not_the_run(victim):
    """No first byte within the limit ends the turn; afterwards the same D serves again."""
    leader = victim.processes["d0"]
    family = machine.members({leader.pid})

    def stall():
        for process in family:
            process.suspend()
        time.sleep(30)
        for process in family:
            process.resume()

    records = play(victim, 8, stall, first_byte_timeout_s=10.0)

    assert Outcome.NO_FIRST_BYTE in {record.outcome for record in records}
    assert victim.dead() == {}
    deadline = time.monotonic() + 30
    while not all(victim.health().values()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert check_canaries(victim.spec, "tiny-llama") == []


@pytest.mark.full
def test_a_taken_port_is_named_with_what_to_do(engine_python, tmp_path):
    """Somebody was faster; the sentence says so and the log is quoted."""
    commands = vllm_commands(Topology.parse("1R"), CPU)
    port = int(commands[0].url.rsplit(":", 1)[1])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(EngineError, match=r"a port was taken.*run it again"),
        launch_commands(commands, tmp_path, 120.0),
    ):
        pass


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere/model"}, "the model is not there.*check --model"),
        ({"cpu_kv_cache_gib": 100000.0}, "too little memory.*--kv-cache-gib"),
        ({"engine_args": ("--no-such-flag",)}, "vLLM does not know an argument"),
    ],
)
def test_an_engine_that_dies_at_start_is_one_sentence_with_its_cause(
    engine_python, tmp_path, changes, words
):
    """The likely cause and what to change, then the last lines of the log."""
    options = LaunchOptions(**({"device": Device.CPU} | changes))
    with (
        pytest.raises(EngineError) as refused,
        launch(Topology.parse("1R"), options, tmp_path),
    ):
        pass

    assert re.search(words, str(refused.value))
    assert "Traceback" not in str(refused.value)
