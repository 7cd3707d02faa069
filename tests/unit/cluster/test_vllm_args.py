from __future__ import annotations

import json
from importlib.metadata import distributions

import pytest

from ppdbench.cluster.vllm_args import (
    Device,
    EngineOptions,
    NodePorts,
    core_shares,
    kv_role,
    node_commands,
    read_device,
    read_gpus,
    read_tensor_parallel,
)
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import NAMED_TOPOLOGIES, Role, Topology


def options(**changes):
    values = {"model": "/m", "served_model_name": "m", "python": "python", "version": (0, 32)}
    return EngineOptions(**(values | changes))


def commands(topology, **changes):
    shape = Topology.parse(topology)
    ports = [NodePorts(8000 + i, 5000 + i) for i in range(len(shape.nodes))]
    return {c.spec.name: c for c in node_commands(shape, options(**changes), ports, [0, 1])}


def connector(command):
    if "--kv-transfer-config" not in command.argv:
        return None
    return json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("topology", [*NAMED_TOPOLOGIES, "1P_1D", "7R", "3P_5D_2pD_1R"])
def test_every_topology_gives_one_command_per_node_with_ports_of_its_own(topology):
    """Whatever the grammar allows can be started; no two nodes share a port."""
    made = commands(topology, device=Device.CPU)

    assert list(made) == [node.name for node in Topology.parse(topology).nodes]
    ports = [c.argv[c.argv.index("--port") + 1] for c in made.values()]
    assert len(set(ports)) == len(ports)


def test_p_produces_and_d_and_pd_consume_and_r_has_no_connector():
    """A pD is a D to the engine: the same process, another routing."""
    made = commands("1R_1P_1D_1pD", device=Device.CPU)

    roles = {name: (connector(c) or {}).get("kv_role") for name, c in made.items()}
    assert roles == {
        "r0": None, "p0": "kv_producer", "d0": "kv_consumer", "pd0": "kv_consumer",
    }  # fmt: skip


def test_older_engines_get_the_role_they_know():
    """Before roles were explicit, every NIXL node was both."""
    assert kv_role(Role.P, (0, 22)) == "kv_both"
    assert kv_role(Role.P, (0, 23)) == "kv_producer"


def test_kv_flows_back_only_when_pulls_are_asked_for():
    """Holding D's KV costs memory on every D, so nobody pays it unasked."""
    for pull in (False, True):
        made = commands("1P_1D", device=Device.CPU, pull=pull)["d0"]
        extra = connector(made)["kv_connector_extra_config"]
        assert extra.get("bidirectional_kv_xfer", False) is pull


def test_gpus_are_dealt_in_order_and_tensor_parallel_nodes_get_several():
    """P=2 takes two devices; the next node the next one."""
    made = commands("1P_2D", gpus=("0", "1", "2", "3"), tensor_parallel={Role.P: 2})

    devices = {name: c.environment["CUDA_VISIBLE_DEVICES"] for name, c in made.items()}
    assert devices == {"p0": "0,1", "d0": "2", "d1": "3"}
    assert "--tensor-parallel-size" in made["p0"].argv
    assert "--tensor-parallel-size" not in made["d0"].argv


def test_a_pd_is_as_wide_as_d_unless_it_is_named():
    """The same process, another routing: a sweep starts one set of nodes for both."""
    assert read_tensor_parallel("D=2")[Role.PD] == 2
    assert read_tensor_parallel("D=2,pD=4")[Role.PD] == 4


def test_nodes_that_share_a_gpu_share_its_memory():
    """Each takes its part, so that the second still fits."""
    made = commands("1P_1D", gpus=("0", "0"))

    for command in made.values():
        at = command.argv.index("--gpu-memory-utilization")
        assert command.argv[at + 1] == "0.45"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gpus": ("0",)}, "2 GPUs are needed"),
        ({"version": (0, 20), "gpus": ("0", "1")}, "too old"),
        ({"connector": "p2p_nccl", "gpus": ("0", "1")}, "--connector nixl"),
        ({"engine_args": ("--port=9",), "gpus": ("0", "1")}, "--port cannot be given"),
        ({"engine_args": ("--served_model_name", "x"), "gpus": ("0", "1")}, "cannot be given"),
        ({"model": "", "gpus": ("0", "1")}, "--model is empty"),
        ({"tensor_parallel": {Role.P: 2}, "gpus": ("0", "0", "1")}, "0,0.*need a GPU each"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(changes, word):
    """One sentence that names the value and the way out."""
    with pytest.raises(UsageError, match=word):
        commands("1P_1D", **changes)


def test_a_users_arguments_come_last_and_so_win():
    """Engine arguments and variables override ours."""
    made = commands("1R", device=Device.CPU, engine_args=("--dtype", "float32"))

    assert made["r0"].argv[-2:] == ("--dtype", "float32")


def test_a_key_of_the_callers_own_does_not_lock_the_nodes(monkeypatch):
    """VLLM_API_KEY is inherited unless it is overridden; vLLM takes an empty one for none."""
    monkeypatch.setenv("VLLM_API_KEY", "for-another-server")

    assert all(c.environment["VLLM_API_KEY"] == "" for c in commands("1P_1D", gpus="01").values())


@pytest.mark.parametrize(
    ("cores", "nodes", "shares"),
    [
        ([0, 1], 4, ["0", "1", "0", "1"]),
        ([4, 5, 6, 7], 2, ["4,5", "6,7"]),
        ([0, 1, 2], 2, ["0", "1"]),
    ],
)
def test_cores_are_shared_evenly(cores, nodes, shares):
    """Whole cores, as many to each; too few go round."""
    assert core_shares(cores, nodes) == shares


def test_options_are_read_as_written():
    """``--tp`` takes a number or roles; ``--device`` one of two words."""
    assert read_tensor_parallel("P=2,D=1") == {Role.P: 2, Role.D: 1, Role.PD: 1}
    assert read_gpus("0, 1") == ("0", "1")
    assert read_gpus("") == ()
    assert read_tensor_parallel("2")[Role.R] == 2
    assert read_device("cpu") is Device.CPU
    for read, text in ((read_tensor_parallel, "X=1"), (read_tensor_parallel, "0"),
                       (read_tensor_parallel, "P=2,P=3"), (read_gpus, "0,,1"),
                       (read_device, "tpu")):  # fmt: skip
        with pytest.raises(UsageError, match=text):
            read(text)


def test_cpu_nodes_get_the_plugin_that_lets_their_threads_sleep():
    """An entry point in a folder on PYTHONPATH makes it a plugin; GPU nodes stay as they are."""
    made = commands("1P_1D", device=Device.CPU)["p0"].environment
    on_gpu = commands("1P_1D", gpus=("0", "1"))["p0"].environment

    found = [
        point.value
        for package in distributions(path=[made["PYTHONPATH"]])
        for point in package.entry_points
        if point.group == "vllm.general_plugins"
    ]
    assert found == ["ppd_few_cores:register"]
    assert "PYTHONPATH" not in on_gpu


def test_kv_events_are_published_by_all_that_decode_and_reach_no_network():
    """Off unless asked for; each home has a socket of its own on this machine, P has none."""
    gpus = tuple("0123")
    silent = commands("1P_2D_1R", gpus=gpus)
    asked = commands("1P_2D_1R", gpus=gpus, kv_events=True)

    assert {c.kv_events for c in silent.values()} == {None}
    assert asked["p0"].kv_events is None
    assert "--kv-events-config" not in asked["p0"].argv
    homes = [asked[name] for name in ("d0", "d1", "r0")]
    assert len({c.kv_events for c in homes}) == 3
    for each in homes:
        config = json.loads(each.argv[each.argv.index("--kv-events-config") + 1])
        assert config["endpoint"] == each.kv_events
        assert each.kv_events.startswith("ipc://@")
