"""A live sweep on scripted clusters: paths proven, failures recorded, nodes shared and watched."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest

from ppdbench.cluster import canary
from ppdbench.cluster.launch import Cluster
from ppdbench.core.errors import EngineError, RunError, UsageError
from ppdbench.core.topology import Role, Topology
from ppdbench.experiments import live
from ppdbench.experiments.clusters import Attaching, cast, shape_of
from ppdbench.experiments.grid import load_grid
from ppdbench.experiments.live import LiveBackend, LiveOptions
from ppdbench.experiments.measuring import Measuring
from ppdbench.experiments.sweep import sweep
from ppdbench.runs.manifest import EngineIdentity
from ppdbench.runs.recording import read_records
from ppdbench.runs.store import read_points, read_timing
from ppdbench.testing import FakeEngine, Fault, FaultKind, ScriptedCluster, every

GRID = """
rates_per_s = [200]
duration_s = 0.2
keep_records = true
[[arm]]
topologies = ["1P_1D"]
policies = ["remote", "local"]
[[workload]]
name = "tiny"
turns = [[64, 4], [32, 4]]
"""


class ThreadedCluster:
    """A ScriptedCluster on a loop of its own, as engines of another process would be."""

    def __init__(self, topology="1P_1D", engine_for=lambda _: FakeEngine()):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._cluster = ScriptedCluster(topology, engine_for)

    def __enter__(self):
        self._thread.start()
        self._call(self._cluster.__aenter__())
        return self

    def __exit__(self, *_):
        self._call(self._cluster.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def spec(self):
        return self._cluster.spec

    def close_node(self, name):
        self._call(self._cluster.engines[name].close())

    def _call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Sweep the grid on a source; the run folder's points."""
    monkeypatch.setattr("ppdbench.load.proving.PAUSE_S", 0.02)

    def sweep_it(source, text=GRID, **options):
        path = tmp_path / "grid.toml"
        path.write_text(text)
        grid = load_grid(str(path))
        measuring = Measuring(grid, 1, keep_records=True)
        backend = LiveBackend(measuring, source, LiveOptions(**options))
        sweep(backend, tmp_path / "run", resume=True)
        return read_points(tmp_path / "run")

    return sweep_it


def by_policy(points):
    return {point["policy"]: point for point in points}


def test_both_routes_are_measured_and_proven(run, tmp_path):
    """Remote moves KV each turn, local only for Turn 1; both get the same conversations."""
    with ThreadedCluster() as cluster:
        points = by_policy(run(Attaching(cluster.spec)))

    remote, local = points["remote"], points["local"]
    # A busy machine may make the client late: that is said, and no fault of the sweep.
    assert set(remote["validity"]) <= {"too_few", "client_limited"}
    assert local["path_proven"] is remote["path_proven"] is True
    assert remote["bytes_moved"] > local["bytes_moved"] > 0
    assert remote["seed"] == local["seed"]
    assert remote["turns"] == local["turns"] == 2 * local["conversations"] > 20
    assert local["turn2plus"]["effective_new_tokens"]["mean"] < 64 + 32
    timing = {line["point"]: line for line in read_timing(tmp_path / "run")}
    assert all(line["problems"] == [] and line["attempt"] == 1 for line in timing.values())


@pytest.mark.slow
def test_warm_up_is_marked_and_stored_apart(run, tmp_path):
    """One conversation of two turns for the one home, in no figure of the point."""
    with ThreadedCluster() as cluster:
        points = run(Attaching(cluster.spec))
    slug = next((tmp_path / "run/points").glob("*.json")).stem

    warm = read_records(tmp_path / "run", slug, "warm_up")
    measured = read_records(tmp_path / "run", slug)
    assert [record.turn for record in warm] == [1, 2]
    assert all(record.warm_up and record.conversation.startswith("warm-up/") for record in warm)
    assert not any(record.warm_up for record in measured)
    assert len(measured) == points[0]["turns"]


@pytest.mark.slow
def test_a_d_that_prefills_for_itself_leaves_the_path_unproven(run):
    """It ignores the hand-off and answers well, with HTTP 200: only its counters tell."""

    def engine(spec):
        return FakeEngine(honest_handoff=spec.role is Role.P)

    with ThreadedCluster(engine_for=engine) as cluster:
        points = by_policy(run(Attaching(cluster.spec), canaries=False))

    assert points["remote"]["success"] == 1.0
    assert "path_unproven" in points["remote"]["validity"]


@pytest.mark.slow
def test_a_slowed_client_is_client_limited(run, monkeypatch):
    """Each decision holds the client's loop up for 15 ms; the same sweep without it is clean."""
    honest = live.policy_of

    class Slow:
        def __init__(self, policy):
            self.name, self._policy = policy.name, policy

        def decide(self, features, home):
            time.sleep(0.015)
            return self._policy.decide(features, home)

    monkeypatch.setattr(live, "policy_of", lambda key: Slow(honest(key)))
    with ThreadedCluster() as cluster:
        points = run(Attaching(cluster.spec))

    assert all("client_limited" in point["validity"] for point in points)


@pytest.mark.slow
def test_failing_turns_do_not_unprove_the_path(run):
    """A broken stream may or may not have moved KV; the route was still the one asked for."""

    def engine(spec):
        broken = every(5, Fault(FaultKind.BREAK, after_tokens=1))
        return FakeEngine(faults=broken if spec.role is Role.D else None)

    with ThreadedCluster(engine_for=engine) as cluster:
        points = run(Attaching(cluster.spec), canaries=False, warm_up=0)

    assert all(point["failures"]["broken_stream"] > 0 for point in points)
    assert all(point["path_proven"] is True for point in points)
    assert all("errors" in point["validity"] for point in points)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "named"), [({"warm_up": 0}, "flags.warm_up"), ({"canaries": False}, "flags.canaries")]
)
def test_a_run_resumes_only_with_the_warm_up_and_canaries_it_began_with(run, other, named):
    """Both change what the points of one folder mean."""
    with ThreadedCluster() as cluster:
        run(Attaching(cluster.spec))
        with pytest.raises(RunError, match=named):
            run(Attaching(cluster.spec), **other)


class Fragile:
    """A source whose clusters lose a node in each of the first ``deaths`` attempts."""

    start_s = 0.0

    def __init__(self, cluster, deaths):
        self.opened, self.restarts, self.deaths = [], 0, deaths
        self._cluster = cluster

    def identity(self, shapes):
        return EngineIdentity("attach", "fake")

    @contextmanager
    def open(self, shape):
        self.opened.append(str(shape))
        yield FragileCluster(self, self._cluster.spec)


class FragileCluster(Cluster):
    """The node is sick from an attempt's first look at the engine on, until the restart."""

    def __init__(self, source, spec):
        super().__init__(spec)
        self._source, self._sick_node = source, False

    @property
    def facts(self):
        self._sick_node = self._sick_node or self._source.deaths > 0
        self._source.deaths -= 1
        return super().facts

    def health(self):
        return {**super().health(), "d0": not self._sick_node}

    def dead(self):
        return {"d0": "node d0 ended with signal 9"} if self._sick_node else {}

    def restart(self):
        self._source.restarts += 1
        self._sick_node = False


@pytest.mark.slow
def test_a_failed_point_is_retried_once_on_a_fresh_cluster(run, tmp_path):
    """A node dies in the first attempt; the second one counts, and nobody sees a difference."""
    with ThreadedCluster() as cluster:
        source = Fragile(cluster, deaths=1)
        points = run(source, canaries=False)

    attempts = sorted(line["attempt"] for line in read_timing(tmp_path / "run"))
    assert source.restarts == 1
    assert attempts == [1, 2]
    assert all("engine_failed" not in point["validity"] for point in points)


@pytest.mark.slow
def test_a_point_that_fails_twice_is_recorded_and_does_not_poison_the_next(run):
    """The cause stands in the point; the next point starts on a fresh cluster."""
    with ThreadedCluster() as cluster:
        source = Fragile(cluster, deaths=2)
        points = run(source, canaries=False)

    failed = [point for point in points if "engine_failed" in point["validity"]]
    assert len(failed) == 1
    assert "d0 did not answer" in failed[0]["cause"]
    assert "node d0 ended with signal 9" in failed[0]["cause"]
    assert source.restarts == 2
    assert [p["success"] for p in points if p not in failed] == [1.0]


@pytest.mark.slow
def test_an_attached_cluster_that_died_ends_the_sweep_and_can_be_resumed(run, tmp_path):
    """It is not ours to restart: exit code 3, what was measured stays."""
    with ThreadedCluster() as cluster:
        cluster.close_node("d0")
        with pytest.raises(EngineError, match="d0 did not answer the health check"):
            run(Attaching(cluster.spec))
    with ThreadedCluster() as again:
        assert len(run(Attaching(again.spec))) == 2


def test_an_attached_cluster_whose_nodes_do_not_reach_each_other_is_told_so(run, monkeypatch):
    """Before the first point: a preflight, as a launched one gets; it names the pair."""
    monkeypatch.setattr(canary, "_PREFLIGHT_WITHIN_S", 0.3)

    def engine(spec):
        refuse = every(1, Fault(FaultKind.STATUS))
        return FakeEngine(faults=refuse if spec.role is Role.D else None)

    with (
        ThreadedCluster(engine_for=engine) as cluster,
        pytest.raises(EngineError, match=r"preflight remote p0→d0.*network"),
    ):
        run(Attaching(cluster.spec))


@pytest.mark.slow
def test_a_point_over_its_time_fails_with_that_cause(run):
    """A hanging engine costs the point its limit, not the sweep its life."""

    def engine(spec):
        hang = every(4, Fault(FaultKind.HANG))
        return FakeEngine(faults=hang if spec.role is Role.D else None)

    with ThreadedCluster(engine_for=engine) as cluster:
        points = run(Attaching(cluster.spec), canaries=False, warm_up=0, point_timeout_s=1.0)

    assert [point["cause"] for point in points] == ["the point did not end within 1 s"] * 2


@pytest.mark.slow
def test_a_pd_is_a_d_with_another_routing_and_shares_its_process(run):
    """1P_1D and 1P_1pD need the same processes: one start, and the pD's later turns are local."""
    text = GRID.replace('["1P_1D"]', '["1P_1D", "1P_1pD"]').replace('"remote", "local"', '"roles"')
    with ThreadedCluster() as cluster:
        source = Fragile(cluster, deaths=0)
        points = {point["topology"]: point for point in run(source, text, canaries=False)}

    assert source.opened == ["1P_1D"]
    assert points["1P_1D"]["routes"].keys() == {"remote"}
    assert points["1P_1pD"]["routes"]["local"] == points["1P_1pD"]["conversations"]


def test_casting_names_nodes_as_the_topology_does():
    """Every P stays a P; of two D's one plays the pD."""
    with ThreadedCluster("1P_2D") as cluster:
        spec = cast(cluster.spec, Topology.parse("1P_1D_1pD"))

    assert [(node.name, node.role) for node in spec.nodes] == [
        ("p0", Role.P), ("d0", Role.D), ("pd0", Role.PD)
    ]  # fmt: skip
    assert len({node.url for node in spec.nodes}) == 3
    assert str(shape_of(Topology.parse("1R_1P_1D_2pD"))) == "1R_1P_3D"


def test_an_attached_cluster_of_another_shape_is_refused(run):
    """Before anything runs, and both shapes are named."""
    with ThreadedCluster("2R") as cluster, pytest.raises(UsageError, match=r"is 2R .* wants 1P_1D"):
        run(Attaching(cluster.spec))
