"""The command and environment of every vLLM node of a topology. Pure: nothing is started here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ppdbench.core.errors import UsageError
from ppdbench.core.topology import NodeSpec, Role, Topology

HOST = "127.0.0.1"
MIN_VERSION = (0, 21)
NEWEST_KNOWN_VERSION = (0, 32)
EXPLICIT_ROLES_VERSION = (0, 23)
"""Before it every NIXL node is ``kv_both``; since then that is deprecated for P and D roles."""

CPU_PLUGIN = Path(__file__).parent / "engine_plugin"
"""A vLLM plugin, found on PYTHONPATH, that keeps waiting threads from burning the shared cores."""

OURS = frozenset({
    "--api-key", "--host", "--kv-transfer-config", "--model", "--port", "--served-model-name",
    "--ssl-certfile", "--ssl-keyfile", "--uds",
})  # fmt: skip
"""Arguments that say where a node is and what it is; another value and we would not find it."""

FIRST_DRY_PORT = 8101
FIRST_DRY_NIXL_PORT = 5601
"""Ports in commands that are only shown; a start takes ports that are free."""


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


def read_device(text: str) -> Device:
    """A device as written in options."""
    try:
        return Device(text)
    except ValueError:
        raise UsageError(f"--device {text!r} is unknown; known: cuda, cpu") from None


def read_tensor_parallel(text: str) -> dict[Role, int]:
    """``2`` for every role, or ``P=2,D=1``; a pD is as wide as D, other roles not named have 1."""
    try:
        if "=" not in text:
            return dict.fromkeys(Role, _positive(text))
        pairs = [part.split("=") for part in text.split(",")]
        widths = {Role(role.strip()): _positive(width) for role, width in pairs}
    except ValueError:
        raise UsageError(f"--tp {text!r} is neither a number nor like P=2,D=1") from None
    if len(widths) < len(pairs):
        raise UsageError(f"--tp {text!r} names a role twice; give each one width")
    if Role.D in widths:
        widths.setdefault(Role.PD, widths[Role.D])
    return widths


def read_gpus(text: str) -> tuple[str, ...]:
    """Device ids as in ``0,1,2``, in order; none where the option is left out."""
    ids = tuple(each.strip() for each in text.split(","))
    if ids == ("",):
        return ()
    if not all(ids):
        raise UsageError(f"--gpus {text!r} has an empty device id; write it as in 0,1,2,3")
    return ids


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user chose for all nodes.

    ``python`` runs vLLM. ``version`` is vLLM's ``(major, minor)``. ``gpus`` are device ids; one
    named n times is shared by n nodes. ``pull`` lets P read D's KV, at a price: every D then pins
    the KV of each finished remote turn for ``held_kv_s``. ``lease_s`` is how long P keeps blocks
    that no D has read. ``kv_events``: nodes that decode publish what their caches store
    and lose.
    """

    model: str
    served_model_name: str
    python: str
    version: tuple[int, int]
    device: Device = Device.CUDA
    gpus: tuple[str, ...] = ()
    tensor_parallel: Mapping[Role, int] = field(default_factory=dict)
    dtype: str = "bfloat16"
    connector: str = "nixl"
    dummy_weights: bool = False
    max_model_len: int | None = None
    cpu_kv_cache_gib: float = 1.0
    pull: bool = False
    held_kv_s: int = 120
    lease_s: int = 30
    kv_events: bool = False
    engine_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodePorts:
    """Ports that one node listens on: HTTP, and NIXL's handshake where it has one."""

    http: int
    nixl: int


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """How to start one node. ``environment`` is added to the caller's, search paths in front.

    ``kv_events`` is where it publishes its KV events, if it does.
    """

    spec: NodeSpec
    url: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    kv_events: str | None = None

    def as_shell(self) -> str:
        """One line to paste into a shell."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def node_commands(
    topology: Topology,
    options: EngineOptions,
    ports: Sequence[NodePorts],
    cores: Sequence[int] = (),
) -> tuple[NodeCommand, ...]:
    """One command per node, in topology order. ``cores`` are bound on CPU only.

    Raises:
        UsageError: an engine version, a connector or a number of GPUs that cannot work.
    """
    check_supported(options)
    placed = _placements(topology, options, cores)
    return tuple(
        NodeCommand(
            spec,
            f"http://{HOST}:{port.http}",
            (*_base_argv(options, port), *_role_argv(spec.role, options),
             *_events_argv(_events_endpoint(spec.role, options, port)), *where.argv,
             *options.engine_args),
            {
                **_environment(spec.role, options, port),
                **where.environment,
                **options.environment,
            },
            _events_endpoint(spec.role, options, port),
        )
        for spec, port, where in zip(topology.nodes, ports, placed, strict=True)
    )  # fmt: skip


def check_supported(options: EngineOptions) -> None:
    """Refuse what is known not to work.

    Raises:
        UsageError: naming the value, what is supported, and what to change.
    """
    check_version(options.version, options.python)
    if options.connector != "nixl":
        raise UsageError(
            f"connector {options.connector!r} cannot be launched: its hand-off is not NIXL's and "
            "vLLM ≥ 0.21 ships no P2pNccl; use --connector nixl"
        )
    if taken := sorted({argument_name(text) for text in options.engine_args} & OURS):
        raise UsageError(
            f"--engine-arg {taken[0]} cannot be given: ppd sets it for each node and reaches the "
            "node by it; leave it out (--model has an option of its own)"
        )
    if not options.model.strip():
        raise UsageError("--model is empty; give a name as in meta-llama/Llama-3.1-8B, or a folder")


def argument_name(text: str) -> str:
    """``--block-size`` of ``--block-size=16`` and, as vLLM reads it, of ``--block_size``."""
    return text.partition("=")[0].replace("_", "-")


def check_version(version: tuple[int, int], where: str) -> None:
    """Refuse a vLLM whose counters cannot prove a route.

    Raises:
        UsageError: naming the version, where it is, and what is needed.
    """
    if version < MIN_VERSION:
        have, need = (".".join(map(str, v)) for v in (version, MIN_VERSION))
        raise UsageError(
            f"vLLM {have} at {where} is too old: {need} or newer counts prompt tokens by source, "
            "without which no route can be proven; upgrade it or use another"
        )


def _base_argv(options: EngineOptions, port: NodePorts) -> list[str]:
    argv = [
        options.python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", options.model,
        "--served-model-name", options.served_model_name,
        "--host", HOST, "--port", str(port.http),
        "--dtype", options.dtype,
        "--enable-prefix-caching", "--enable-prompt-tokens-details",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    if options.dummy_weights:
        argv += ["--load-format", "dummy"]
    if options.max_model_len is not None:
        argv += ["--max-model-len", str(options.max_model_len)]
    if options.device is Device.CPU:
        argv += ["--enforce-eager"]
    return argv


def _role_argv(role: Role, options: EngineOptions) -> list[str]:
    if role is Role.R:
        return []
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role(role, options.version),
        "kv_buffer_device": options.device.value,
        "kv_connector_extra_config": _connector_config(options),
    }
    return ["--kv-transfer-config", json.dumps(config)]


def _events_endpoint(role: Role, options: EngineOptions, port: NodePorts) -> str | None:
    """A socket of this machine, without a file, named by a port that is the node's alone.

    For TCP vLLM binds a wildcard only, which every network of the machine would reach.
    """
    return f"ipc://@ppd-kv-events-{port.http}" if options.kv_events and role.decodes else None


def _events_argv(endpoint: str | None) -> list[str]:
    if endpoint is None:
        return []
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return ["--kv-events-config", json.dumps(config)]


def _connector_config(options: EngineOptions) -> dict[str, object]:
    """Where pulls are on, a pull is a pull: vLLM would compute up to 64 missing tokens instead."""
    config: dict[str, object] = {"kv_lease_duration": options.lease_s}
    if options.pull:
        config |= {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": options.held_kv_s,
            "kv_recompute_threshold": 0,
        }
    return config


def kv_role(role: Role, version: tuple[int, int]) -> str:
    """The connector's name for a role under this vLLM."""
    if version < EXPLICIT_ROLES_VERSION:
        return "kv_both"
    return "kv_producer" if role is Role.P else "kv_consumer"


def _environment(role: Role, options: EngineOptions, port: NodePorts) -> dict[str, str]:
    # A key that the caller exports for other servers would lock us out of our own nodes.
    values = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_API_KEY": ""}
    if options.model.startswith(("/", ".")):
        values["HF_HUB_OFFLINE"] = "1"
    if role is not Role.R:
        values["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
        values["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port.nixl)
    if options.device is Device.CPU:
        values["VLLM_CPU_KVCACHE_SPACE"] = f"{options.cpu_kv_cache_gib:g}"
        values |= {"UCX_TLS": "tcp,self,sm,cma", "UCX_NET_DEVICES": "lo"}
        # vLLM sets the last one itself, but only before NIXL is loaded, which the plugin does.
        values |= {"PYTHONPATH": str(CPU_PLUGIN), "UCX_RCACHE_MAX_UNRELEASED": "1024"}
        # scripts/engine puts libnuma there where the system has none; vLLM's kernels need it.
        values["LD_LIBRARY_PATH"] = str(Path(options.python).parent.parent / "lib")
    return values


@dataclass(frozen=True, slots=True)
class _Placement:
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def _placements(
    topology: Topology, options: EngineOptions, cores: Sequence[int]
) -> list[_Placement]:
    if options.device is Device.CPU:
        shares = core_shares(cores, len(topology.nodes))
        return [_Placement((), {"VLLM_CPU_OMP_THREADS_BIND": share}) for share in shares]
    return _gpu_placements([(n, options.tensor_parallel.get(n.role, 1)) for n in topology.nodes],
                           options.gpus)  # fmt: skip


def core_shares(cores: Sequence[int], nodes: int) -> list[str]:
    """An equal share of whole cores per node; with fewer cores than nodes they take turns."""
    each = max(1, len(cores) // nodes)
    wanted = [[cores[(i * each + k) % len(cores)] for k in range(each)] for i in range(nodes)]
    return [",".join(map(str, share)) for share in wanted]


def _gpu_placements(
    widths: Sequence[tuple[NodeSpec, int]], gpus: Sequence[str]
) -> list[_Placement]:
    needed = sum(width for _, width in widths)
    if len(gpus) < needed:
        raise UsageError(
            f"{needed} GPUs are needed ({', '.join(f'{n.name}×{w}' for n, w in widths)}) and "
            f"{len(gpus)} are given ({','.join(gpus) or 'none'}); name more with --gpus, or one "
            "several times to share it, or use --device cpu"
        )
    placed, start = [], 0
    for _, width in widths:
        placed.append(_gpu_placement(gpus[start : start + width], gpus[:needed]))
        start += width
    return placed


def _gpu_placement(own: Sequence[str], used: Sequence[str]) -> _Placement:
    if len(set(own)) < len(own):
        raise UsageError(
            f"--gpus gives one node {','.join(own)}: the ranks of a tensor-parallel node need "
            "a GPU each; name different ones in its place"
        )
    argv = [] if len(own) == 1 else ["--tensor-parallel-size", str(len(own))]
    sharing = max(used.count(gpu) for gpu in own)
    if sharing > 1:
        argv += ["--gpu-memory-utilization", f"{0.9 / sharing:.2f}"]
    return _Placement(tuple(argv), {"CUDA_VISIBLE_DEVICES": ",".join(own)})
