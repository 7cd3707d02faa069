"""A sample of the authors' measured points against the simulator; the whole is scripts/fidelity."""

from __future__ import annotations

from statistics import median

import pytest

from ppdbench.experiments.fidelity import Guess, simulate, usable
from ppdbench.experiments.fidelity_report import Pair, same_winner
from ppdbench.runs.importers import vllm_ppd

WORKLOADS = ("small_mid_bal", "large_mid_bal", "large_big_paste")
RATES = (4, 10)
UNSEEN = (("1P_3D", "1P_3pD"), ("3P_1D", "3P_1pD"))


@pytest.mark.slow
def test_unseen_topologies_are_predicted(reference_sweep):
    """Where nothing was fitted: TPOT to 6 %, TTFT to 20 % at the median, and the same winner."""
    found = {
        (point["topology"], point["workload"], point["rate_per_s"]): Pair(
            point, simulate(point, Guess(), (1,))
        )
        for point in vllm_ppd(reference_sweep).points
        if point["topology"] in {name for twins in UNSEEN for name in twins}
        and point["workload"] in WORKLOADS
        and point["rate_per_s"] in RATES
        and usable(point)
    }
    verdicts = [
        same_winner(found[remote, workload, rate], found[local, workload, rate], "ttft_s")
        for remote, local in UNSEEN
        for workload in WORKLOADS
        for rate in RATES
        if (remote, workload, rate) in found and (local, workload, rate) in found
    ]

    assert len(found) >= 12
    assert median(abs(pair.error("tpot_s")) for pair in found.values()) < 0.06
    assert median(abs(pair.error("ttft_s")) for pair in found.values()) < 0.20
    assert False not in verdicts
    assert True in verdicts
