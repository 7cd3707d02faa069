"""A run compared with its replay; here a simulated run stands for the live one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ppdbench.core.errors import RunError
from ppdbench.experiments.choosing import Choice, choose_backend
from ppdbench.experiments.replay import compare_with_replay
from ppdbench.experiments.sweep import sweep
from ppdbench.sim.calibrated import Calibration, StepCosts, write_calibration

STEPS = StepCosts(
    step_s=3e-3,
    sequence_s=1e-4,
    token_s=2e-5,
    pair_s=7e-9,
    prefix_s=4e-6,
    decode_token_s=2e-7,
    request_s=5e-3,
)
HOP = {"fixed_s": 0.01, "per_token_s": 1e-5}
FITTED = Calibration("tiny", "vllm", "0", 128, 500_000, 2048, 8192, 2048, STEPS, {}, HOP)
SLOWER = 1.1
SCRIPT = Path(__file__).parents[2] / "scripts" / "fidelity"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    write_calibration(folder / "costs.json", FITTED)
    settings = {"costs": str(folder / "costs.json")}
    backend = choose_backend(Choice("fidelity-live", seed=5, jobs=1, settings=settings))
    sweep(backend, folder / "run")
    return folder


def test_a_simulation_is_its_own_replay(run):
    """Grid, seed and costs give the very same turns: every error is 0, and no path is told."""
    document = compare_with_replay(run / "run", run / "costs.json")
    figures = [f for p in document["points"] for f in p["figures"].values()]
    pooled = [f for row in document["pooled"].values() for f in row.values()]

    assert (document["compared"], document["left_out"]) == (15, {})
    assert {figure["error"] for figure in figures + pooled} == {0}
    assert document["winners"]["ttft_later_p50"]["differ"] > 0
    assert str(run) not in json.dumps(document)


def test_slower_costs_show_as_that_error(run, tmp_path):
    """Every cost × 1.1: where turns hardly ever meet, the median is 10 % too long."""
    slower = replace(
        FITTED,
        steps=StepCosts(**{name: value * SLOWER for name, value in asdict(STEPS).items()}),
        hop={name: value * SLOWER for name, value in HOP.items()},
    )
    write_calibration(tmp_path / "slower.json", slower)
    points = compare_with_replay(run / "run", tmp_path / "slower.json")["points"]
    alone = [point["figures"] for point in points if point["rate_per_s"] == 0.5]

    assert len(alone) == 5
    for figures in alone:
        for name in ("ttft_later_p50", "ttft_first_p50", "tpot_p50"):
            assert figures[name]["error"] == pytest.approx(SLOWER - 1, abs=1e-6)


def test_costs_of_another_engine_are_refused(run, tmp_path):
    """Another block size caches other prefixes: no comparison."""
    write_calibration(tmp_path / "other.json", replace(FITTED, block_tokens=16))

    with pytest.raises(RunError, match="128 tokens and the costs were fitted with 16"):
        compare_with_replay(run / "run", tmp_path / "other.json")


def fidelity(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


def test_the_script_writes_the_comparison_and_prints_its_table(run, tmp_path):
    """Sorted keys in live.json; the table is printed as it is stored; the figure is there."""
    out = tmp_path / "out"
    result = fidelity("--live", run / "run", "--costs", run / "costs.json", "-o", out)
    text = (out / "live.json").read_text()

    assert result.returncode == 0, result.stderr
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    assert result.stdout == (out / "live.md").read_text()
    assert (out / "live.png").stat().st_size > 10_000


def test_the_script_wants_the_run_and_its_costs_together(run):
    """One without the other is wrong use, not the other comparison."""
    result = fidelity("--live", run / "run")

    assert result.returncode == 2
    assert "--live RUN and --costs FILE belong together" in result.stderr
