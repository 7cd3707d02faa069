"""A sweep over real vLLM: cold caches, proven paths, and local turns that move nothing more."""

from __future__ import annotations

import pytest

from ppdbench.experiments.clusters import Attaching
from ppdbench.experiments.grid import load_grid
from ppdbench.experiments.live import LiveBackend
from ppdbench.experiments.measuring import Measuring
from ppdbench.experiments.sweep import sweep
from ppdbench.runs.recording import read_records
from ppdbench.runs.store import read_manifest, read_points

pytestmark = pytest.mark.full

GRID = """
rates_per_s = [1]
duration_s = 5
repeats = 2
keep_records = true
[[arm]]
topologies = ["1P_1D"]
policies = ["remote", "local"]
[[workload]]
name = "short_chat"
turns = [[256, 16], [64, 16]]
"""


@pytest.fixture(scope="module")
def run(one_p_one_d, tmp_path_factory):
    """Both routes, two repeats, on the session's cluster."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "grid.toml").write_text(GRID)
    measuring = Measuring(load_grid(str(folder / "grid.toml")), 1, keep_records=True)
    sweep(LiveBackend(measuring, Attaching(one_p_one_d.spec)), folder / "run")
    return folder / "run"


def test_every_point_is_served_cold_and_by_the_route_it_claims(run):
    """No Turn 1 finds a token in the cache, in either repeat, and the counters agree."""
    points = read_points(run)

    assert len(points) == 4
    assert [point["success"] for point in points] == [1.0] * 4
    assert [point["turn1"]["effective_new_tokens"]["mean"] for point in points] == [256.0] * 4
    assert not any("cache_contaminated" in point["validity"] for point in points)
    assert all(point["path_proven"] is True for point in points)
    assert all(point["turn2plus"]["ttft_s"]["mean"] > 0 for point in points)


def test_both_routes_got_the_same_conversations_and_local_moved_less(run):
    """Paired by seed and prompt; the later turns' KV is the difference."""
    points = read_points(run)
    remote, local = ([p for p in points if p["policy"] == name] for name in ("remote", "local"))

    for one, other in zip(remote, local, strict=True):
        assert one["seed"] == other["seed"]
        assert one["turns"] == other["turns"]
        assert one["bytes_moved"] > other["bytes_moved"] > 0
        assert other["routes"] == {"remote": one["turns"] // 2, "local": one["turns"] // 2}


def test_each_turn_says_what_the_server_had_cached(run):
    """Records hold the server's counts, token instants, and warm-up apart."""
    slug = "1P_1D.local.short_chat.1.0"

    measured, warm = read_records(run, slug), read_records(run, slug, "warm_up")
    assert all(record.cached_tokens is not None and record.ok for record in measured)
    assert {record.cached_tokens for record in measured if record.turn == 1} == {0}
    assert all(record.cached_tokens >= 128 for record in measured if record.turn == 2)
    assert all(len(record.token_at_s) == 16 for record in measured)
    assert [record.turn for record in warm] == [1, 2]


def test_the_manifest_names_the_engine_that_answered(run):
    """Version, model and block size come from the nodes themselves."""
    engine = read_manifest(run).engine

    assert (engine.backend, engine.engine, engine.block_size) == ("attach", "vllm", 128)
    assert engine.engine_version
    assert engine.model
