"""A sweep measures each point once, writes equal bytes, and continues where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ppdbench.core.errors import RunError, UsageError, WorkloadError
from ppdbench.experiments.choosing import Choice, choose_backend, sim_config
from ppdbench.experiments.sweep import sweep
from ppdbench.runs.aggregate import Limits
from ppdbench.runs.recording import read_records
from ppdbench.runs.store import read_manifest, read_points, read_timing

GRID = """
rates_per_s = [8]
duration_s = 5
repeats = 2
[[arm]]
topologies = ["2P_2D"]
policies = ["remote", "local"]
[[arm]]
topologies = ["4R"]
policies = ["roles"]
[[workload]]
name = "tiny"
turns = [[128, 32], [16, 16]]
"""


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(GRID)
    return path


def backend(grid, **changes):
    return choose_backend(Choice(**{"grid": str(grid), "seed": 1, "jobs": 1, **changes}))


def ppd(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ppdbench", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.slow
def test_equal_sweeps_are_equal_bytes_whatever_the_hash_seed_and_the_processes(grid, tmp_path):
    """One process here against two workers of another interpreter with another hash seed."""
    sweep(backend(grid), tmp_path / "here")
    there = ppd(
        "sweep", "--grid", grid, "--seed", 1, "--jobs", 2, "-o", tmp_path / "there", "--json",
        PYTHONHASHSEED="42",
    )  # fmt: skip

    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["points"] == 6
    here = (tmp_path / "here/points.jsonl").read_bytes()
    assert here == (tmp_path / "there/points.jsonl").read_bytes()
    assert here.count(b"\n") == 6


def test_points_stand_in_grid_order_and_paired_points_share_their_seed(grid, tmp_path):
    """Arms, then repeats; both routes of a repeat got the same conversations."""
    sweep(backend(grid), tmp_path / "run")
    points = read_points(tmp_path / "run")

    assert [(p["topology"], p["policy"], p["repeat"]) for p in points] == [
        ("2P_2D", "remote", 0), ("2P_2D", "remote", 1), ("2P_2D", "local", 0),
        ("2P_2D", "local", 1), ("4R", "roles", 0), ("4R", "roles", 1),
    ]  # fmt: skip
    assert points[0]["seed"] == points[2]["seed"] != points[1]["seed"]
    assert points[2]["routes"]["local"] == points[2]["turn2plus"]["n"] > 0


def test_resume_measures_exactly_what_is_missing(grid, tmp_path):
    """Two points are taken away; only they are measured again, and the bytes are the same."""
    run = tmp_path / "run"
    sweep(backend(grid), run)
    whole = (run / "points.jsonl").read_bytes()
    gone = sorted((run / "points").glob("*.json"))[1:3]
    for path in gone:
        path.unlink()

    reported = []
    result = sweep(backend(grid), run, resume=True, report=reported.append)

    assert {p.measured.key.slug for p in reported} == {path.stem for path in gone}
    assert [p.done for p in reported] == [5, 6]
    assert result.effort.points == 2
    assert (run / "points.jsonl").read_bytes() == whole
    assert len(list(read_timing(run))) == 8


def test_resume_on_a_complete_run_measures_nothing_and_on_a_missing_one_starts_it(grid, tmp_path):
    """Both exit well, so that a job script needs one command only."""
    started = sweep(backend(grid), tmp_path / "run", resume=True)
    again = sweep(backend(grid), tmp_path / "run", resume=True)

    assert (started.effort.points, again.effort.points) == (6, 0)
    assert started.points == again.points == 6


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 2}, "seed"),
        ({"settings": {"gpu": "a100_sxm"}}, "gpu"),
        ({"limits": Limits(ttft_s=0.1)}, r"goodput_limits\.ttft_s"),
    ],
)
def test_resume_refuses_another_experiment(grid, tmp_path, change, field):
    """The field that differs is named."""
    sweep(backend(grid), tmp_path / "run")

    with pytest.raises(RunError, match=f"{field} is"):
        sweep(backend(grid, **change), tmp_path / "run", resume=True)


def test_a_changed_grid_is_refused(grid, tmp_path):
    """Another duration makes other points under the same names."""
    sweep(backend(grid), tmp_path / "run")
    grid.write_text(GRID.replace("duration_s = 5", "duration_s = 6"))

    with pytest.raises(RunError, match="grid_digest is"):
        sweep(backend(grid), tmp_path / "run", resume=True)


def test_an_interrupt_keeps_what_was_finished(grid, tmp_path):
    """Ctrl-C after two points: they are stored, and points.jsonl has them."""

    def interrupt(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(backend(grid), tmp_path / "run", report=interrupt)

    assert len(read_points(tmp_path / "run")) == 2
    assert sweep(backend(grid), tmp_path / "run", resume=True).effort.points == 4


def test_records_are_kept_on_request_and_do_not_change_the_points(grid, tmp_path):
    """Simulated runs keep them only when asked."""
    sweep(backend(grid), tmp_path / "without")
    sweep(backend(grid, keep_records=True), tmp_path / "with")
    slug = next((tmp_path / "with/points").glob("*.json")).stem

    assert not (tmp_path / "without/records").exists()
    kept = read_records(tmp_path / "with", slug)
    assert {record.turn for record in kept} == {1, 2}
    assert all(record.ok for record in kept)
    without, kept_too = (
        (tmp_path / name / "points.jsonl").read_bytes() for name in ("without", "with")
    )
    assert without == kept_too


def test_the_manifest_says_what_was_simulated(grid, tmp_path):
    """Enough to repeat the run, and to refuse to mix it."""
    sweep(backend(grid), tmp_path / "run")
    manifest = read_manifest(tmp_path / "run").document()

    assert manifest["backend"] == "sim"
    assert manifest["seed"] == 1
    assert manifest["gpu"] == "h100_sxm"
    assert manifest["workload_digests"].keys() == {"tiny"}
    assert manifest["flags"]["max_batched_tokens"] == 8192


def test_settings_of_the_grid_stand_until_an_option_says_otherwise():
    """An option that was not given leaves the file's word; an unknown one is refused."""
    proposed = {"gpu": "a100_sxm", "link": "ib_hdr"}

    assert sim_config(proposed, {"gpu": None}).gpu == "a100_sxm"
    assert sim_config(proposed, {"gpu": "h200_sxm"}).gpu == "h200_sxm"
    with pytest.raises(UsageError, match="'warp'"):
        sim_config({"warp": 9}, {})


def test_an_unknown_backend_or_grid_is_refused():
    """Exit code 2 belongs to both errors."""
    with pytest.raises(UsageError, match="known backends: sim"):
        choose_backend(Choice(grid="smoke", backend="cloud"))
    with pytest.raises(WorkloadError, match="nosuch"):
        choose_backend(Choice(grid="nosuch"))


@pytest.mark.parametrize("setting", ["gpu", "model"])
def test_what_cannot_be_simulated_is_refused_before_any_data_is_read(setting, tmp_path):
    """The grid's conversations are not even there, and it is the setting that is named."""
    path = tmp_path / "recorded.toml"
    path.write_text(GRID.replace("turns = [[128, 32], [16, 16]]", 'source = "absent.json"'))
    refused = ppd("sweep", "--grid", path, f"--{setting}", "abacus", "-o", tmp_path / "run")

    assert refused.returncode == 2
    assert refused.stderr.startswith("ppd: unknown")
    assert "'abacus'" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_the_command_plans_without_running_and_refuses_an_existing_run(grid, tmp_path):
    """--dry-run says how many and how long; a folder with a run is wrong use."""
    plan = ppd("sweep", "--grid", grid, "--dry-run", "--json")
    sweep(backend(grid), tmp_path / "run")
    refused = ppd("sweep", "--grid", grid, "-o", tmp_path / "run")

    assert json.loads(plan.stdout)["points"] == 6
    assert json.loads(plan.stdout)["expected_s"] > 0
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_repeats_stop_where_the_means_are_known(grid, tmp_path):
    """±50 % is known after three of ten repeats; both routes keep equal repeats; resume agrees."""
    text = GRID.replace("repeats = 2", "repeats = 10").replace("[8]", "[8, 2]")
    grid.write_text(text)

    stopped = sweep(backend(grid), tmp_path / "wide", stop_width=0.5)
    exact = sweep(backend(grid), tmp_path / "narrow", stop_width=0.0)
    again = sweep(backend(grid), tmp_path / "wide", stop_width=0.5, resume=True)

    repeats = {(p["policy"], p["rate_per_s"]): p["repeat"] + 1 for p in read_points(stopped.run)}
    assert repeats[("remote", 8.0)] == repeats[("local", 8.0)] == 3
    assert (stopped.points, exact.points) == (18, 60)
    assert (again.points, again.effort.points) == (18, 0)
    with pytest.raises(RunError, match=r"stop_width is 0\.5"):
        sweep(backend(grid), tmp_path / "wide", resume=True)


@pytest.mark.slow
def test_a_stopped_sweep_has_the_same_bytes_on_any_number_of_processes(grid, tmp_path):
    """Only earlier repeats decide, not the order in which points finish."""
    grid.write_text(GRID.replace("repeats = 2", "repeats = 6"))
    for jobs in (1, 2):
        sweep(backend(grid, jobs=jobs), tmp_path / str(jobs), stop_width=0.04)

    one, two = ((tmp_path / name / "points.jsonl").read_bytes() for name in ("1", "2"))
    assert one == two
    assert 9 <= one.count(b"\n") <= 18


def test_a_closed_loop_keeps_its_users_busy(grid, tmp_path):
    """Five users: never more than five turns out at once, and throughput of what came."""
    grid.write_text(
        GRID.replace("rates_per_s = [8]", "users = [5]").replace("duration_s = 5\n", "")
        + '[arrivals]\nprocess = "closed"\nconversations_per_user = 4\n'
    )
    sweep(backend(grid, keep_records=True), tmp_path / "run")
    point = read_points(tmp_path / "run")[0]
    kept = read_records(tmp_path / "run", "2P_2D.remote.tiny.5.0")

    out = [sum(r.sent_at_s <= o.sent_at_s < r.finished_at_s for r in kept) for o in kept]
    assert max(out) == 5
    assert backend(grid).expected_s(backend(grid).measuring.grid.points()) < 60
    assert point["rate_per_s"] == 5.0
    assert point["window_s"] > 0
    assert point["requests_per_s"] > 0
