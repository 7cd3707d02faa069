"""The authors' 3,060 points: our importer and builder against a calculation of its own.

The direct calculation below reads the raw files and shares no code with ``ppdbench``.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.runs.contests import ttft_tpot_conflict, win_rates
from ppdbench.runs.store import read_points
from ppdbench.table.build import build_table
from ppdbench.table.schema import counts
from ppdbench.table.score import Rule
from ppdbench.table.sources import read_runs

PAIRS = {
    "1P_3D": "1P_3pD",
    "2P_2D": "2P_2pD",
    "3P_1D": "3P_1pD",
    "1R_1P_2D": "1R_1P_2pD",
    "1R_2P_1D": "1R_2P_1pD",
    "2R_1P_1D": "2R_1P_1pD",
}


def invoke(*arguments):
    """Run ``ppd … --json`` and give its document."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="session")
def raw(reference_sweep):
    """(config, workload, qps) → the file's content."""
    documents = [json.loads(path.read_text()) for path in reference_sweep.rglob("*.json")]
    return {(d["config"], d["workload"], d["qps"]): d for d in documents}


@pytest.fixture(scope="session")
def imported(reference_sweep, tmp_path_factory):
    """The sweep as a run, and what the command said."""
    run = tmp_path_factory.mktemp("runs") / "authors"
    return run, invoke("import", "vllm-ppd", reference_sweep, "-o", run)


@pytest.fixture(scope="session")
def runs(imported):
    return read_runs([imported[0]])


def direct(raw, *, base, w_tpot, stat="avg", floor=0.0):
    """Decisions by plain arithmetic on the raw files: (local, remote, one_sided, failed)."""
    counts = [0, 0, 0, 0]
    for (config, workload, qps), pd in raw.items():
        if config != base:
            continue
        ppd = raw[PAIRS[base], workload, qps]
        dead = [
            d["turn2"]["count"] == 0 or d["success_rate"] == 0 or d["success_rate"] < 100 * floor
            for d in (pd, ppd)
        ]
        if any(dead):
            counts[3 if all(dead) else 0 if dead[0] else 1] += 1
            counts[2] += not all(dead)
            continue
        ttft0, ttft1 = (d["turn2"][f"{stat}_ttft_ms"] for d in (pd, ppd))
        tpot0, tpot1 = (d["turn2"][f"{stat}_tpot_ms"] for d in (pd, ppd))
        gain = (ttft0 - ttft1) / ttft0 if ttft0 > 0 else 0
        cost = (tpot1 - tpot0) / tpot0 if tpot0 > 0 else 0
        counts[0 if gain - w_tpot * cost > 0 else 1] += 1
    return tuple(counts)


def built(imported, tmp_path, *, base, w_tpot):
    said = invoke(
        "build-table", imported[0], "--base", base, "--w-ttft", 1, "--w-tpot", w_tpot,
        "--stat", "mean", "--min-success", 0, "-o", tmp_path / "T.json",
    )  # fmt: skip
    return said["local"], said["remote"], said["one_sided"], said["failed"]


def test_the_import_keeps_every_point(imported):
    """3,060 points, 116 of them below 95 % success, none missing."""
    said = imported[1]

    assert (said["points"], said["below_95"], said["missing"]) == (3060, 116, 0)


@pytest.mark.parametrize(
    ("base", "w_tpot", "expected"),
    [
        ("2P_2D", 1, (178, 2, 0, 0)),
        ("2P_2D", 6, (162, 18, 0, 0)),
        ("1P_3D", 1, (178, 2, 30, 0)),
    ],
)
def test_the_known_counts_come_out(imported, tmp_path, base, w_tpot, expected):
    """Counts that were established on this sweep before this tool existed."""
    assert built(imported, tmp_path, base=base, w_tpot=w_tpot) == expected


@pytest.mark.parametrize("base", PAIRS)
@pytest.mark.parametrize("rule", [(1, "mean", 0.0), (3, "p50", 0.95), (20, "p99", 0.5)])
def test_every_pair_agrees_with_the_direct_calculation(runs, raw, base, rule):
    """All six pairs, hybrids too, under other weights, statistics and success floors."""
    w_tpot, stat, floor = rule
    name = {"mean": "avg"}.get(stat, stat)

    expected = direct(raw, base=base, w_tpot=w_tpot, stat=name, floor=floor)
    table = build_table(runs, [base], Rule(1, w_tpot, stat, min_success=floor)).table
    said = counts(table)
    assert (said["local"], said["remote"], said["one_sided"], said["failed"]) == expected
    assert sum(expected[:2]) + expected[3] == 180


def contests(summary):
    """The summary's answers, win rates in percent by category."""
    order = ("replica", "remote", "mixed", "local", "hybrid")
    percent = {
        name: [round(100 * shares[category], 1) for category in order]
        for name, shares in summary["win_rates"].items()
    }
    return summary["ttft_tpot_conflict"], percent


KNOWN_CONTESTS = (
    {"cells": 180, "differ": 166},
    {
        "ttft": [63.3, 0.0, 0.6, 27.2, 8.9],
        "tpot": [6.1, 38.3, 33.3, 15.6, 6.7],
        "throughput": [2.2, 15.6, 27.8, 38.3, 16.1],
    },
)


def test_the_conflict_and_the_winners_come_out(imported):
    """166 of 180 cells have another TTFT-best than TPOT-best; win rates as first established."""
    points = read_points(imported[0])
    summary = {"ttft_tpot_conflict": ttft_tpot_conflict(points), "win_rates": win_rates(points)}

    assert contests(summary) == KNOWN_CONTESTS


@pytest.mark.slow
def test_the_summary_of_a_plot_holds_them(imported, tmp_path):
    """``ppd plot`` on the run says the same, on stdout and in ``summary.json``."""
    said = invoke("plot", imported[0], "-o", tmp_path / "figures")
    stored = json.loads((tmp_path / "figures" / "summary.json").read_text())

    assert contests(said) == contests(stored) == KNOWN_CONTESTS
