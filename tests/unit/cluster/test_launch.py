"""Launching programs that are no good engines; the real ones are in tests/live."""

from __future__ import annotations

import re

import psutil
import pytest

from ppdbench.cluster.causes import CAUSES, likely_cause, why_it_died
from ppdbench.cluster.launch import LaunchOptions, engine_options, launch_commands
from ppdbench.cluster.processes import free_ports
from ppdbench.cluster.vllm_args import Device, NodeCommand
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import NodeSpec, Role


def launched(argv, tmp_path, ready_within_s=10.0):
    spec = NodeSpec("r0", Role.R)
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    commands = [NodeCommand(spec, url, tuple(argv), {})]
    with launch_commands(commands, tmp_path / "logs", ready_within_s):
        pass


def test_a_node_that_ends_before_it_is_ready_says_why(tmp_path):
    """Exit code, likely cause, what to change, and the last lines of its log."""
    script = "echo 'RuntimeError: Address already in use' >&2; exit 3"

    with pytest.raises(EngineError) as error:
        launched(["/bin/sh", "-c", script], tmp_path)

    assert re.search("r0 ended with exit code 3.*a port was taken.*run it again", str(error.value))
    assert "Address already in use" in str(error.value)


def test_a_node_that_prints_nothing_and_ends_is_doubted(tmp_path):
    """``--vllm`` named something that is no engine."""
    with pytest.raises(EngineError, match=r"it printed nothing.*--vllm"):
        launched(["/bin/true"], tmp_path)


@pytest.mark.slow
def test_a_node_that_never_answers_and_ignores_sigterm_is_given_up_and_gone(tmp_path):
    """The wait has an end, and so has the process."""
    stubborn = "trap '' TERM; echo $$ > pid; while true; do sleep 0.1; done"

    with pytest.raises(EngineError, match=r"did not answer within 1 s.*--ready-within"):
        launched(["/bin/sh", "-c", f"cd {tmp_path}; {stubborn}"], tmp_path, ready_within_s=1.0)

    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("", "has no vLLM .*nothing"),
        ("echo no such module >&2; exit 1", "no such module"),
    ],
)
def test_a_python_without_vllm_is_refused_before_anything_starts(tmp_path, script, words):
    """It is asked for its version; what it said instead stands in the sentence."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)

    with pytest.raises(EngineError, match=words):
        engine_options(LaunchOptions(device=Device.CPU, vllm=str(python)))


@pytest.mark.parametrize(
    ("log", "exit_code", "cause"),
    [
        ("ValueError: ... Free memory on device (1/80 GiB) is less", 1, "too little memory"),
        ("OSError: Can't load the configuration of 'x'", 1, "the model is not there"),
        ("api_server.py: error: unrecognized arguments: --x", 2, "does not know an argument"),
        ("RuntimeError: No CUDA GPUs are available", 1, "sees no GPU"),
        ("starting", -9, "it was killed"),
        ("all is well", 1, "not one we know"),
    ],
)
def test_causes_are_read_from_the_log(log, exit_code, cause):
    """Each sign leads to its cause and to something to change."""
    assert cause in likely_cause(log, exit_code)[0]
    assert likely_cause(log, exit_code)[1]


def test_every_sign_is_a_pattern_and_every_cause_has_a_remedy():
    """No cause is a dead end."""
    for cause in CAUSES:
        assert all(re.compile(sign) for sign in cause.signs)
        assert cause.change


def test_a_log_that_was_never_written_is_no_crash(tmp_path):
    """The node may have died before its first byte."""
    assert "Last lines of" in why_it_died("r0", None, tmp_path / "none.log")


def test_a_death_is_told_the_same_at_start_and_in_mid_run(tmp_path):
    """Nothing is claimed about when the node died: it may have served for hours."""
    log = tmp_path / "d0.log"
    log.write_text("Application startup complete.\nPOST /v1/completions 200\n")

    assert why_it_died("d0", -9, log).startswith("node d0 ended with signal 9: it was killed")
