"""``ppd cluster up | down | status``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.modes import DEVICES_OF, refuse_elsewhere, typed_options
from ppdbench.cli.output import command, if_interrupted, say, show, show_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppdbench.cluster.launch import LaunchedCluster, LaunchOptions
    from ppdbench.cluster.state import ClusterState, StateFolder
    from ppdbench.cluster.vllm_args import NodeCommand
    from ppdbench.core.topology import Topology

app = typer.Typer(
    no_args_is_help=True,
    help="Start, watch and stop a cluster of vLLM or simulated nodes.",
    epilog="Example: ppd cluster up 1P_1D --device cpu",
)

StateOption = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="State folder [user's state folder].")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

VLLM_OPTIONS = (
    "device", "gpus", "tp", "connector", "vllm", "dtype", "max_model_len", "kv_cache_gib",
    "dummy_weights", "pull", "lease", "kv_events", "engine_arg",
)  # fmt: skip
BACKENDS_OF = {"gpu": ("sim",), **dict.fromkeys(VLLM_OPTIONS, ("vllm",))}
"""Options of ``up`` that not every backend reads."""


@app.command(epilog="Example: ppd cluster up 1P_3D --device cpu")
@command
def up(
    context: typer.Context,
    topology: Annotated[str, typer.Argument(metavar="TOPOLOGY", help="As in 1P_3D, 4R, 2P_2pD.")],
    *,
    backend: Annotated[str, typer.Option(help="vllm or sim.")] = "vllm",
    model: Annotated[str | None, typer.Option(help="Name or folder [cpu: a tiny Llama].")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    gpus: Annotated[str, typer.Option(help="Device ids, as in 0,1,2,3.")] = "",
    tp: Annotated[str, typer.Option(help="Tensor parallel: 2, or P=2,D=1.")] = "1",
    connector: Annotated[str, typer.Option(help="KV connector; nixl.")] = "nixl",
    vllm: Annotated[str | None, typer.Option(help="The python that has vLLM.")] = None,
    dtype: Annotated[str, typer.Option(help="Weights and KV.")] = "bfloat16",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence.")] = None,
    kv_cache_gib: Annotated[float, typer.Option(min=0, help="KV cache per node, on CPU.")] = 1.0,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights; nothing is loaded.")
    ] = False,
    pull: Annotated[
        bool, typer.Option("--pull", help="Let P read D's KV; D then holds it for a while.")
    ] = False,
    lease: Annotated[int, typer.Option(min=6, help="Seconds P keeps KV nobody read.")] = 30,
    kv_events: Annotated[
        bool, typer.Option("--kv-events", help="Let nodes tell `ppd serve` what KV they evict.")
    ] = False,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="Passed to vLLM as it is; may be repeated.")
    ] = None,
    canaries: Annotated[
        bool, typer.Option("--canaries", help="Compare greedy answers of every route.")
    ] = False,
    gpu: Annotated[str | None, typer.Option(help="Simulated GPU (sim).")] = None,
    ready_within: Annotated[float, typer.Option(min=1, help="Seconds to wait.")] = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each node's command; start nothing.")
    ] = False,
    state: StateOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001
) -> None:
    """Start a cluster and leave it running once every node has answered a request."""
    from ppdbench.core.topology import Topology

    _check(typed_options(context), backend, device)
    shape = Topology.parse(topology)
    options = launch_options(
        model=model, device=device, gpus=gpus, tp=tp, connector=connector, vllm=vllm, dtype=dtype,
        max_model_len=max_model_len, cpu_kv_cache_gib=kv_cache_gib, dummy_weights=dummy_weights,
        pull=pull, lease_s=lease, kv_events=kv_events, engine_args=tuple(engine_arg or ()),
        ready_within_s=ready_within,
    )  # fmt: skip
    folder = _folder(state)
    if dry_run:
        _show_commands(_dry_commands(backend, shape, options, gpu, folder), as_json=as_json)
        return
    with folder.alone():
        folder.refuse_second()
        commands = _commands(backend, shape, options, gpu, folder)
        _up(folder, backend, commands, ready_within, _check_with(pull=pull) if canaries else None)
    _show_status(folder, as_json=as_json)


@app.command(epilog="Example: ppd cluster down")
@command
def down(
    *,
    state: StateOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001
) -> None:
    """Stop exactly what `up` started; does nothing when nothing is up."""
    folder = _folder(state)
    ended = folder.down()
    if as_json:
        show_json({"nodes": [] if ended is None else _nodes_document(ended, checked=False)})
    elif ended is None:
        say(f"no cluster is up (state in {folder.folder})")
    else:
        say(f"{ended.spec.topology} is down; logs stay in {folder.logs}")


@app.command(epilog="Example: ppd cluster status --watch")
@command
def status(
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Load, KV use and transfers, until Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between readings.")] = 2.0,
    state: StateOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001
) -> None:
    """Which nodes are up and healthy; exit code 1 when none is."""
    folder = _folder(state)
    if watch:
        from ppdbench.cli.cluster_watch import watch_cluster

        watch_cluster(_running(folder).spec, interval)
        return
    _show_status(folder, as_json=as_json)


def _check(typed: set[str], backend: str, device: str) -> None:
    from ppdbench.core.errors import UsageError

    if backend not in ("vllm", "sim"):
        raise UsageError(f"--backend {backend!r} cannot be started; known: vllm, sim")
    refuse_elsewhere(typed, BACKENDS_OF, "backend", backend)
    refuse_elsewhere(typed, DEVICES_OF, "device", device)


def _folder(state: Path | None) -> StateFolder:
    from ppdbench.cluster.folders import state_folder
    from ppdbench.cluster.state import StateFolder

    return StateFolder(state or state_folder())


def _running(folder: StateFolder) -> ClusterState:
    from ppdbench.core.errors import NothingUsableError

    state = folder.read()
    if state is None:
        raise NothingUsableError(
            f"no cluster is up (state in {folder.folder}); start one with `ppd cluster up 1P_1D`"
        )
    return state


def launch_options(*, device: str, gpus: str, tp: str, **rest: Any) -> LaunchOptions:  # noqa: ANN401
    """The options of a launch, from their texts; ``ppd sweep`` has the same ones."""
    from ppdbench.cluster.launch import LaunchOptions
    from ppdbench.cluster.vllm_args import read_device, read_gpus, read_tensor_parallel

    return LaunchOptions(
        device=read_device(device),
        gpus=read_gpus(gpus),
        tensor_parallel=read_tensor_parallel(tp),
        **rest,
    )


def _commands(
    backend: str, shape: Topology, options: LaunchOptions, gpu: str | None, folder: StateFolder
) -> Sequence[NodeCommand]:
    from ppdbench.cluster.launch import vllm_commands
    from ppdbench.cluster.processes import free_ports

    if backend == "sim":
        return _sim_commands(shape, free_ports(len(shape.nodes)), options.model, gpu, folder)
    return vllm_commands(shape, options)


def _dry_commands(
    backend: str, shape: Topology, options: LaunchOptions, gpu: str | None, folder: StateFolder
) -> Sequence[NodeCommand]:
    from ppdbench.cluster.launch import planned_commands
    from ppdbench.cluster.vllm_args import FIRST_DRY_PORT

    if backend == "sim":
        ports = range(FIRST_DRY_PORT, FIRST_DRY_PORT + len(shape.nodes))
        return _sim_commands(shape, ports, options.model, gpu, folder)
    return planned_commands(shape, options)


def _sim_commands(
    shape: Topology, ports: Sequence[int], model: str | None, gpu: str | None, folder: StateFolder
) -> Sequence[NodeCommand]:
    from ppdbench.sim.commands import sim_commands, write_config
    from ppdbench.sim.config import SimConfig
    from ppdbench.sim.prepare import capacity_for

    chosen: dict[str, Any] = {
        key: value for key, value in (("model", model), ("gpu", gpu)) if value is not None
    }
    config = SimConfig(**chosen)
    capacity_for(config)  # an unknown GPU or model is refused here, not by every node's death
    config_file = write_config(config, folder.folder / "sim.json")
    return sim_commands(shape, ports, config_file)


def _up(
    folder: StateFolder,
    backend: str,
    commands: Sequence[NodeCommand],
    ready_within_s: float,
    check: Callable[[LaunchedCluster], None] | None,
) -> None:
    from ppdbench.cluster.launch import launch_commands

    say(f"starting {len(commands)} nodes; logs in {folder.logs}")
    stopped = if_interrupted("no node that was started stays up")
    with stopped, launch_commands(commands, folder.logs, ready_within_s, say) as cluster:
        if check is not None:
            check(cluster)
        folder.write(backend, cluster.spec, cluster.processes)
        cluster.detach()


def _check_with(*, pull: bool) -> Callable[[LaunchedCluster], None]:
    from ppdbench.cluster.canary import check_canaries, paths_of
    from ppdbench.core.errors import EngineError

    def check(cluster: LaunchedCluster) -> None:
        problems = check_canaries(cluster.spec, cluster.facts.model, pull=pull, notice=say)
        if problems:
            raise EngineError("; ".join(problems))
        say(f"canaries agree over {len(paths_of(cluster.spec, pull=pull))} paths")

    return check


def _show_commands(commands: Sequence[NodeCommand], *, as_json: bool) -> None:
    if as_json:
        nodes = [
            {"name": c.spec.name, "role": c.spec.role.value, "url": c.url, "argv": list(c.argv),
             "environment": dict(c.environment)} for c in commands
        ]  # fmt: skip
        show_json({"nodes": nodes})
        return
    for each in commands:
        show(f"# {each.spec.name} ({each.spec.role}) at {each.url}\n{each.as_shell()}")


def _show_status(folder: StateFolder, *, as_json: bool) -> None:
    nodes = _nodes_document(_running(folder), checked=True)
    if as_json:
        show_json({"nodes": nodes, "cluster_file": str(folder.cluster_file)})
    else:
        for node in nodes:
            health = "healthy" if node["healthy"] else "not healthy"
            show(f"{node['name']:4} {node['role']:2} {node['url']} pid {node['pid']} {health}")
        show(f"cluster file: {folder.cluster_file}")
    if not any(node["healthy"] for node in nodes):
        raise typer.Exit(1)


def _nodes_document(state: ClusterState, *, checked: bool) -> list[dict[str, Any]]:
    from ppdbench.cluster.launch import is_healthy

    return [
        {
            "name": node.name,
            "role": node.role.value,
            "url": node.url,
            "pid": state.processes[node.name].pid,
            "healthy": checked and state.alive(node) and is_healthy(node),
        }
        for node in state.spec.nodes
    ]
