"""An option that the chosen backend or device would not read is refused before anything runs."""

from __future__ import annotations

import inspect

import pytest
from typer.testing import CliRunner

from ppdbench.cli import cluster, modes, sweep
from ppdbench.cli.app import app

SWEEP = ("sweep", "--grid", "smoke", "--dry-run")
UP = ("cluster", "up", "1P_1D", "--dry-run")
SIM, VLLM = ("--backend", "sim"), ("--backend", "vllm")
ATTACH = ("--backend", "attach", "--node", "R=http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SWEEP, "--cluster", "c.toml"), "--cluster belongs to --backend attach"),
        ((*SWEEP, *SIM, "--tp", "2"), "--tp belongs to --backend vllm"),
        ((*SWEEP, *SIM, "--device", "cuda"), "--device belongs to --backend vllm"),
        ((*SWEEP, *SIM, "--dtype", "half"), "--dtype belongs to --backend vllm or attach"),
        ((*SWEEP, *SIM, "--no-canaries"), "--no-canaries belongs to --backend vllm or attach"),
        (
            (*SWEEP, *SIM, "--max-hand-offs", "2"),
            "--max-hand-offs belongs to --backend vllm or att",
        ),
        ((*SWEEP, *VLLM, "--gpu", "h100_sxm"), "--gpu belongs to --backend sim or attach"),
        ((*SWEEP, *VLLM, "--costs", "roofline"), "--costs belongs to --backend sim"),
        ((*SWEEP, *VLLM, "--device", "cpu", "--tp", "2"), "--tp belongs to --device cuda"),
        ((*SWEEP, *ATTACH, "--trace", "t"), "--trace belongs to --backend sim"),
        ((*SWEEP, *ATTACH, "--model", "m"), "--model belongs to --backend sim or vllm"),
        ((*SWEEP, *ATTACH, "--cluster", "c.toml"), "either --cluster cluster.toml or --node"),
        ((*SWEEP, "--backend", "cloud", "--tp", "2"), "unknown backend 'cloud'"),
        ((*SWEEP, "--slo-tpot", "inf"), "--slo-tpot is inf; give a finite number"),
        ((*SWEEP, "--stop-width", "inf"), "--stop-width is inf; give a finite number"),
        ((*SWEEP, "--resume"), "--resume continues the run in -o"),
        ((*UP, *SIM, "--device", "cpu"), "--device belongs to --backend vllm"),
        ((*UP, *SIM, "--lease", "30"), "--lease belongs to --backend vllm"),
        ((*UP, "--gpu", "h100_sxm"), "--gpu belongs to --backend sim"),
        ((*UP, "--device", "cpu", "--gpus", "0"), "--gpus belongs to --device cuda"),
        ((*UP, "--model", "m", "--kv-cache-gib", "2"), "--kv-cache-gib belongs to --device cpu"),
        (
            ("microbench", *VLLM, "--device", "cpu", "--gpus", "0"),
            "--gpus belongs to --device cuda",
        ),
    ],
)
def test_an_option_of_another_mode_is_a_sentence_and_exit_code_2(arguments, said):
    """Also when its value is the default: it was typed, so it was meant."""
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        (*SWEEP, "--gpu", "h200_sxm", "--jobs", "1"),
        (*UP, *SIM, "--gpu", "h200_sxm"),
    ],
)
def test_an_option_of_the_chosen_mode_is_taken(arguments, tmp_path):
    """The same names, where they belong."""
    state = ("--state", str(tmp_path)) if "cluster" in arguments else ()
    assert CliRunner().invoke(app, [*arguments, *state]).exit_code == 0


@pytest.mark.parametrize(
    ("run", "owners"), [(sweep.sweep, sweep.BACKENDS_OF), (cluster.up, cluster.BACKENDS_OF)]
)
def test_every_owned_name_is_an_option(run, owners):
    """A renamed option would fall out of the list unseen."""
    assert owners.keys() <= inspect.signature(run).parameters.keys()
    assert modes.DEVICES_OF.keys() <= inspect.signature(cluster.up).parameters.keys()
