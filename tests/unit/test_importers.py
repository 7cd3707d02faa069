"""The paper authors' result folders: any configuration, whole and fractional rates, failures."""

from __future__ import annotations

import json

import pytest

from ppdbench.core.errors import RunError
from ppdbench.runs import importers


def turn(count, ms):
    stats = {f"{s}_{q}_ms": ms for s in ("avg", "p50", "p99") for q in ("ttft", "tpot", "e2e")}
    return {"count": count, **stats}


def write(folder, config, workload, qps, *, name=None, success=100.0, count=5):
    document = {
        "config": config, "workload": workload, "qps": qps,
        "turn1": turn(count, 100.0), "turn2": turn(count, 50.0), "average": turn(2 * count, 75.0),
        "throughput": {"requests_per_sec": 1.5, "tokens_per_sec": 800.0},
        "success_rate": success, "total_requests": 2 * count, "failed_requests": 0,
        "duration_sec": 20.0, "timestamp": "2026-01-18T00:00:00", "error": None,
    }  # fmt: skip
    path = folder / config / (name or f"{config}_{workload}_{qps}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_figures_come_in_seconds_and_unknown_ones_are_null(tmp_path):
    """Milliseconds become seconds; percentiles nobody wrote are null, never 0."""
    write(tmp_path, "1R_1P_1D_1pD", "large_mid_bal", 8)
    point = importers.vllm_ppd(tmp_path).points[0]

    assert point["turn2plus"]["ttft_s"] == {
        "mean": 0.05, "p50": 0.05, "p90": None, "p95": None, "p99": 0.05,
    }  # fmt: skip
    assert point["turn2plus"]["context_tokens"] == {"mean": 2048}
    assert point["turn2plus"]["effective_new_tokens"] == {"mean": None}
    assert point["output_tokens_per_s"] is None
    assert point["with_drain"]["output_tokens_per_s"] == 800.0
    assert point["validity"] == ["too_few"]


def test_rates_are_numbers_whatever_the_file_is_called(tmp_path):
    """``…_8.json`` and ``…_8.0.json`` are the same rate; both at once is a contradiction."""
    write(tmp_path, "4R", "small_tiny", 8)
    write(tmp_path, "4R", "small_tiny", 0.5)
    points = importers.vllm_ppd(tmp_path).points
    assert [point["rate_per_s"] for point in points] == [0.5, 8.0]

    write(tmp_path, "4R", "small_tiny", 8.0, name="4R_small_tiny_8.0.json")
    with pytest.raises(RunError, match=r"4R_small_tiny_8\.0\.json.*remove one"):
        importers.vllm_ppd(tmp_path)


def test_a_failed_point_has_no_figures(tmp_path):
    """The zeros of a point without a turn are not latencies."""
    write(tmp_path, "3P_1D", "small_tiny", 1, success=0, count=0)
    imported = importers.vllm_ppd(tmp_path)

    assert imported.below_95 == 1
    assert imported.points[0]["turn2plus"]["ttft_s"]["mean"] is None
    assert imported.points[0]["validity"] == ["errors", "too_few"]


def test_missing_files_are_named(tmp_path):
    """The product of what is there shows what is not."""
    for rate in (1, 2):
        write(tmp_path, "4R", "small_tiny", rate)
    write(tmp_path, "2P_2D", "small_tiny", 1)

    assert importers.vllm_ppd(tmp_path).missing == ["2P_2D.roles.small_tiny.2.0"]


@pytest.mark.parametrize(
    "change", [{"config": "9X"}, {"workload": "sharegpt"}, {"qps": "fast"}, {"turn2": None}]
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, change):
    """Another configuration, workload or shape is not guessed at."""
    path = write(tmp_path, "4R", "small_tiny", 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(RunError, match=path.name):
        importers.vllm_ppd(tmp_path)


def test_a_folder_above_or_one_configuration_will_do(tmp_path):
    """The result files are found wherever the sweep was unpacked; other JSON is left alone."""
    write(tmp_path / "unpacked" / "sweep", "4R", "small_tiny", 1)
    (tmp_path / "unpacked" / "notes.json").write_text("{}")

    for folder in (tmp_path, tmp_path / "unpacked" / "sweep" / "4R"):
        assert len(importers.vllm_ppd(folder).points) == 1


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("turn2", "avg_ttft_ms"), float("nan")),
        (("turn2", "avg_ttft_ms"), float("inf")),
        (("turn2", "avg_tpot_ms"), -1),
        (("turn2", "p99_tpot_ms"), True),
        (("turn1", "count"), "5"),
        (("turn2", "count"), 1.5),
        (("average", "count"), None),
        (("throughput", "tokens_per_sec"), "fast"),
        (("success_rate",), 250.0),
        (("total_requests",), 10**40),
        (("failed_requests",), []),
        (("qps",), -1),
        (("qps",), 0),
    ],
)
def test_a_value_that_is_no_measurement_is_refused_by_name(tmp_path, place, value):
    """It would become a figure in a table, or a point file that is not JSON."""
    path = write(tmp_path, "4R", "small_tiny", 8)
    document = json.loads(path.read_text())
    part = document
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    path.write_text(json.dumps(document))

    with pytest.raises(RunError, match=r"4R_small_tiny_8\.json is not a result"):
        importers.vllm_ppd(tmp_path)
