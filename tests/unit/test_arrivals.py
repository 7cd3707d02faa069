"""Arrival processes keep their promises over many gaps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ppdbench.core.seeds import rng_for
from ppdbench.workload.arrivals import ArrivalProcess, arrival_times, gaps


@pytest.mark.parametrize(
    ("process", "cv", "tolerance"),
    [
        (ArrivalProcess("constant"), 0.0, 1e-12),
        (ArrivalProcess("poisson"), 1.0, 0.01),
        (ArrivalProcess("gamma", cv=2.0), 2.0, 0.03),
        (ArrivalProcess("gamma", cv=0.5), 0.5, 0.005),
    ],
)
def test_gaps_have_the_asked_rate_and_variation(process, cv, tolerance):
    """Over 100,000 gaps: constant CV 0, Poisson 1 ± 0.01, gamma the requested CV; mean 1/rate."""
    drawn = gaps(process, 5.0, 100_000, rng_for(1, "gaps"))

    assert drawn.std() / drawn.mean() == pytest.approx(cv, abs=tolerance)
    assert drawn.mean() == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
def test_arrivals_rise_and_fill_the_duration(process):
    """Instants rise within [0, duration), about rate × duration of them."""
    times = arrival_times(ArrivalProcess(process, cv=1.5), 10.0, 400.0, rng_for(3))

    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] <= times[-1] < 400
    assert len(times) == pytest.approx(4000, rel=0.06)


def test_a_point_always_has_an_arrival():
    """At half an arrival expected, no seed gives an empty schedule."""
    sizes = [arrival_times(ArrivalProcess(), 0.05, 10.0, rng_for(seed)).size for seed in range(200)]

    assert min(sizes) == 1


def test_the_same_seed_gives_the_same_list_in_every_process():
    """No salted hash: another PYTHONHASHSEED yields the same schedule."""
    code = (
        "from ppdbench.experiments.grid import load_grid;"
        "g = load_grid('paper-synthetic');"
        "print([(a.at_s, a.conversation.id) for a in g.schedule(g.points()[9], 1)][:5])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True,
        ).stdout
        for salt in ("1", "2")
    }  # fmt: skip

    assert len(outputs) == 1
    assert outputs.pop().startswith("[(0.")
