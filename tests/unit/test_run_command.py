"""``ppd run show`` and ``ppd run compare`` on a small simulated run."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.experiments.choosing import Choice, choose_backend
from ppdbench.experiments.sweep import sweep

GRID = """
rates_per_s = [4, 8]
duration_s = 4
keep_records = true
[[arm]]
topologies = ["2P_2D"]
policies = ["remote", "local"]
[[workload]]
name = "paste"
turns = [[128, 16], [512, 16]]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    (folder / "grid.toml").write_text(GRID)
    sweep(choose_backend(Choice(str(folder / "grid.toml"), seed=1, jobs=1)), folder / "run")
    return folder / "run"


def ppd(*arguments):
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def test_show_says_what_was_measured_with_what(run):
    """Manifest, codes and one row per route, as a table and as JSON."""
    document = json.loads(ppd("show", run, "--json").stdout)

    assert document["points"] == 4
    assert document["manifest"]["backend"] == "sim"
    assert [row["policy"] for row in document["routes"]] == ["remote", "local"]
    assert "TTFT" in ppd("show", run).stdout


def test_compare_sees_that_local_appends_start_sooner(run):
    """By conversation: the turns were kept."""
    answer = ppd("compare", run, "--policy", "remote", "--against", "local", "--json")
    rows = {row["metric"]: row for row in json.loads(answer.stdout)["differences"]}

    assert rows["ttft_s"]["verdict"] == "faster"
    assert rows["ttft_s"]["change_ci"][1] < 0
    assert rows["ttft_s"]["change"] == pytest.approx(
        rows["ttft_s"]["second_s"] / rows["ttft_s"]["first_s"] - 1
    )
    assert "not significant" in ppd("compare", run, run).stdout


@pytest.mark.parametrize("arguments", [[], ["--policy", "remote"]])
def test_compare_without_two_sides_is_wrong_use(run, arguments):
    """Exit code 2, with both forms shown."""
    assert ppd("compare", run, *arguments).exit_code == 2


def test_nothing_in_common_is_nothing_usable(run):
    """Exit code 1."""
    assert ppd("compare", run, "--policy", "remote", "--against", "pull").exit_code == 1
