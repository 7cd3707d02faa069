"""A sample of the authors' measured points against the simulator; the whole is scripts/fidelity."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path
from statistics import median

import pytest

from ppdbench.experiments.fidelity import Guess, simulate, usable
from ppdbench.experiments.fidelity_report import Pair, same_winner
from ppdbench.runs.importers import vllm_ppd

WORKLOADS = ("small_mid_bal", "large_mid_bal", "large_big_paste")
RATES = (4, 10)
SCRIPT = Path(__file__).parents[2] / "scripts" / "fidelity"
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--sweep", "none.tar.xz"), "none.tar.xz is not there; name the sweep's archive"),
        (("--sweep", "cut.tar.xz"), "cut.tar.xz is damaged .*; copy it again"),
        (("--sweep", "."), "no CONFIG/CONFIG_WORKLOAD_QPS.json in it"),
        (("--seeds", "0"), "--seeds: invalid count value: '0'"),
        (("-o", "text.tar.xz"), "text.tar.xz cannot be used: File exists"),
    ],
)
def test_the_script_refuses_in_one_sentence(arguments, what, tmp_path):
    """Before anything is simulated: an archive that is missing or damaged, no seed, no folder."""
    (tmp_path / "text.tar.xz").write_text("no archive")
    with tarfile.open(tmp_path / "cut.tar.xz", "w:xz") as archive:
        archive.add(SCRIPT)
    whole = (tmp_path / "cut.tar.xz").read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(whole[: len(whole) // 2])

    done = subprocess.run(
        [sys.executable, SCRIPT, "-o", "out", *arguments],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == 2
    assert re.search(what, done.stderr)
    assert "Traceback" not in done.stderr
