"""Starts the nodes of a topology, waits until they answer, and ends exactly what it started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ppdbench.cluster import control
from ppdbench.cluster.canary import preflight
from ppdbench.cluster.causes import why_it_died
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.counters import Readings, read_nodes
from ppdbench.cluster.engine import EngineFacts, engine_version, find_python, probe
from ppdbench.cluster.guard import Guard
from ppdbench.cluster.processes import Started, free_ports
from ppdbench.cluster.proof import Proof, prove
from ppdbench.cluster.tiny_model import NAME, tiny_model
from ppdbench.cluster.vllm_args import (
    FIRST_DRY_NIXL_PORT,
    FIRST_DRY_PORT,
    NEWEST_KNOWN_VERSION,
    Device,
    EngineOptions,
    NodeCommand,
    NodePorts,
    node_commands,
)
from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError, UsageError
from ppdbench.core.topology import Role, Topology

_POLL_S = 0.25
TINY_MAX_MODEL_LEN = 8192
CPU_NICENESS = 10
"""On CPU the engines share their cores with the client that measures them."""

Progress = Callable[[str], None]


def _silent(_text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What a user asks of a launch; the rest is found out (:func:`engine_options`).

    ``model`` ``None`` is the tiny Llama, on CPU only. ``vllm`` is the python that has vLLM.
    """

    model: str | None = None
    device: Device = Device.CUDA
    gpus: tuple[str, ...] = ()
    tensor_parallel: Mapping[Role, int] = field(default_factory=dict)
    connector: str = "nixl"
    vllm: str | None = None
    dtype: str = "bfloat16"
    dummy_weights: bool = False
    max_model_len: int | None = None
    cpu_kv_cache_gib: float = 1.0
    pull: bool = False
    lease_s: int = 30
    kv_events: bool = False
    engine_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_within_s: float = 600.0


class Cluster:
    """Nodes that answer. Attached ones are somebody else's; :class:`LaunchedCluster` is ours."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self._facts: EngineFacts | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.spec.topology}>"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.spec.nodes

    @property
    def facts(self) -> EngineFacts:
        """What the first node says it is; asked once."""
        if self._facts is None:
            self._facts = probe(self.nodes[0])
        return self._facts

    def health(self) -> dict[str, bool]:
        """By node name, whether it answers its health check now."""
        return {node.name: is_healthy(node) for node in self.nodes}

    def sick(self) -> list[str]:
        """The names of those that do not answer it."""
        return sorted(name for name, good in self.health().items() if not good)

    def dead(self) -> dict[str, str]:
        """By node name, why it ended; nothing is known of nodes that are somebody else's."""
        return {}

    def counters(self) -> Readings:
        """What every node has counted until now."""
        return read_nodes(self.spec)

    def proof(self, before: Readings, after: Readings, turns: Mapping[Route, int]) -> Proof:
        """See :func:`ppdbench.cluster.proof.prove`."""
        return prove(self.spec, before, after, turns)

    def restart(self) -> None:
        """Start every node anew at the same addresses, with empty caches.

        Raises:
            EngineError: the nodes are not ours, or do not come back.
        """
        raise EngineError(
            f"the attached cluster {self.spec.topology} is not ours to restart; "
            "start its nodes again and resume"
        )


class LaunchedCluster(Cluster):
    """Nodes started by this process, held by a :class:`Guard`; not safe for several threads."""

    def __init__(
        self, commands: Sequence[NodeCommand], guard: Guard, logs: Path, ready_within_s: float
    ) -> None:
        super().__init__(
            ClusterSpec(
                tuple(
                    Node(c.spec.name, c.spec.role, c.url, kv_events=c.kv_events) for c in commands
                )
            )
        )
        self.commands = tuple(commands)
        self._guard = guard
        self._logs = logs
        self._ready_within_s = ready_within_s
        self._running: dict[str, Started] = {}

    @property
    def processes(self) -> Mapping[str, Started]:
        """By node name, the process that leads it."""
        return dict(self._running)

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def start(self, say: Progress = _silent) -> None:
        """Start all nodes at once and return when each has answered a request and handed over.

        Raises:
            EngineError: a node ended or did not answer in time, or a P and a D do not reach each
                other; all are stopped then.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for command in self.commands:
                name = command.spec.name
                self._running[name] = self._guard.start(command, self.log_of(name))
            self._wait_until_ready(say)
            preflight(self.spec, self.facts.model, ended=self.dead)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every node with all it started; returns when they are gone."""
        running, self._running = list(self._running.values()), {}
        if running:
            self._guard.stop(running)

    def detach(self) -> None:
        """Let the nodes outlive this process; from now on nothing here ends them."""
        self._guard.detach()
        self._running = {}

    def restart(self) -> None:
        self.stop()
        self.start()

    def dead(self) -> dict[str, str]:
        """By node name, why it ended; empty while all run."""
        ended = {}
        for name, process in self._running.items():
            if not process.alive():
                code = self._guard.exit_code(process)
                ended[name] = why_it_died(name, code, self.log_of(name))
        return ended

    def _wait_until_ready(self, say: Progress) -> None:
        begun = time.monotonic()
        waiting = list(self.nodes)
        while waiting:
            for reason in self.dead().values():
                raise EngineError(reason)
            for node in [n for n in waiting if answers(n)]:
                waiting.remove(node)
                say(f"{node.name} is ready after {time.monotonic() - begun:.0f} s")
            self._check_time(waiting, time.monotonic() - begun)
            time.sleep(_POLL_S)

    def _check_time(self, waiting: Sequence[Node], elapsed_s: float) -> None:
        if waiting and elapsed_s > self._ready_within_s:
            names = ", ".join(node.name for node in waiting)
            raise EngineError(
                f"{names} did not answer within {self._ready_within_s:g} s; read "
                f"{self.log_of(waiting[0].name)}, or allow more with --ready-within"
            )


def is_healthy(node: Node) -> bool:
    try:
        control.get(node, node.url + "/health", timeout_s=2.0)
    except EngineError:
        return False
    return True


def answers(node: Node) -> bool:
    """Whether ``node`` computes: healthy is not enough, it must complete a one-token request."""
    if not is_healthy(node):
        return False
    try:
        model = probe(node).model
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "cache_salt": "ready"}
        return bool(control.post(node, "/v1/completions", body, timeout_s=60.0).get("choices"))
    except EngineError:
        return False


@contextmanager
def launch(
    topology: Topology, options: LaunchOptions, logs: Path, say: Progress = _silent
) -> Iterator[LaunchedCluster]:
    """A cluster of our own for the length of a ``with`` block.

    The nodes end with the block and with this process, however it ends.

    Raises:
        UsageError: options that cannot work.
        EngineError: there is no engine, or a node does not start.
    """
    commands = vllm_commands(topology, options)
    niceness = CPU_NICENESS if options.device is Device.CPU else 0
    with launch_commands(commands, logs, options.ready_within_s, say, niceness=niceness) as up:
        yield up


@contextmanager
def launch_commands(
    commands: Sequence[NodeCommand],
    logs: Path,
    ready_within_s: float,
    say: Progress = _silent,
    *,
    niceness: int = 0,
) -> Iterator[LaunchedCluster]:
    """As :func:`launch`, for commands that are already known, as the simulated nodes' are."""
    guard = Guard(niceness)
    cluster = LaunchedCluster(commands, guard, logs, ready_within_s)
    try:
        cluster.start(say)
        yield cluster
    finally:
        cluster.stop()
        guard.close()


def vllm_commands(topology: Topology, options: LaunchOptions) -> tuple[NodeCommand, ...]:
    """Commands for ports that are free now, cores of this process, and the engine that is there."""
    ports = free_ports(2 * len(topology.nodes))
    pairs = [NodePorts(*ports[i : i + 2]) for i in range(0, len(ports), 2)]
    cores = sorted(os.sched_getaffinity(0))
    return node_commands(topology, engine_options(options), pairs, cores)


def planned_commands(topology: Topology, options: LaunchOptions) -> tuple[NodeCommand, ...]:
    """What :func:`vllm_commands` gives, for a machine that need not be this one.

    No engine is looked for: without ``options.vllm`` it is ``python`` of the newest vLLM known
    here, GPUs are numbered from 0 where none are named, and ports are conventional.
    """
    known = _engine_options(
        options, _model(options), options.vllm or "python", NEWEST_KNOWN_VERSION
    )
    widths = [known.tensor_parallel.get(node.role, 1) for node in topology.nodes]
    if known.device is Device.CUDA and not known.gpus:
        known = replace(known, gpus=tuple(map(str, range(sum(widths)))))
    pairs = [
        NodePorts(FIRST_DRY_PORT + i, FIRST_DRY_NIXL_PORT + i) for i in range(len(topology.nodes))
    ]
    return node_commands(topology, known, pairs, sorted(os.sched_getaffinity(0)))


def engine_options(options: LaunchOptions) -> EngineOptions:
    """Find the engine, its version and the model.

    Raises:
        UsageError: CUDA without a model.
        EngineError: there is no engine.
    """
    model = _model(options)
    python = find_python(options.vllm, options.device)
    return _engine_options(options, model, python, engine_version(python)[1])


def _engine_options(
    options: LaunchOptions, chosen: _Model, python: str, version: tuple[int, int]
) -> EngineOptions:
    model, name, tiny = chosen
    return EngineOptions(
        model=model,
        served_model_name=name,
        python=python,
        version=version,
        device=options.device,
        gpus=options.gpus,
        tensor_parallel=options.tensor_parallel,
        dtype=options.dtype,
        connector=options.connector,
        dummy_weights=options.dummy_weights,
        max_model_len=options.max_model_len or (TINY_MAX_MODEL_LEN if tiny else None),
        cpu_kv_cache_gib=options.cpu_kv_cache_gib,
        pull=options.pull,
        lease_s=options.lease_s,
        kv_events=options.kv_events,
        engine_args=options.engine_args,
        environment=options.environment,
    )


class _Model(NamedTuple):
    path_or_name: str
    served_name: str
    tiny: bool


def _model(options: LaunchOptions) -> _Model:
    if options.model is not None:
        return _Model(options.model, options.model, tiny=False)
    if options.device is Device.CUDA:
        raise UsageError(
            "--device cuda needs --model, as in --model meta-llama/Llama-3.1-8B; "
            "--device cpu without one uses a tiny Llama"
        )
    return _Model(str(tiny_model()), NAME, tiny=True)
