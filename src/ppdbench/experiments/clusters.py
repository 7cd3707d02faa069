"""Where a live sweep gets its clusters from: launched for it, or attached by address."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ppdbench.cluster.canary import preflight
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.engine import engine_version, find_python, probe
from ppdbench.cluster.launch import Cluster, LaunchOptions, launch
from ppdbench.cluster.tiny_model import NAME
from ppdbench.cluster.vllm_args import Device, argument_name
from ppdbench.core.errors import EngineError, UsageError
from ppdbench.core.topology import Role, Topology
from ppdbench.runs.manifest import EngineIdentity

CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 128, 16
"""vLLM's defaults by device; ``--block-size`` among the engine's arguments goes first."""


class ClusterSource(Protocol):
    """Gives a live sweep the cluster of each shape."""

    @property
    def start_s(self) -> float:
        """About how long a cluster takes until it answers."""
        ...

    def identity(self, shapes: Sequence[Topology]) -> EngineIdentity:
        """For the manifest, before any cluster is started.

        Raises:
            PpdError: there is no engine, or it can never have one of ``shapes``.
        """
        ...

    def open(self, shape: Topology) -> AbstractContextManager[Cluster]:
        """A cluster of that shape for the length of a ``with`` block."""
        ...


def shape_of(topology: Topology) -> Topology:
    """The processes behind a topology: a pD is a D with another routing, so they share nodes."""
    counts: dict[Role, int] = {}
    for count, role in topology.parts:
        plain = Role.D if role is Role.PD else role
        counts[plain] = counts.get(plain, 0) + count
    return Topology(tuple((count, role) for role, count in counts.items()))


def cast(spec: ClusterSpec, topology: Topology) -> ClusterSpec:
    """The nodes of a cluster in the roles and under the names that ``topology`` gives them."""
    waiting = {
        role: [node for node in spec.nodes if _plain(node.role) is role]
        for role in (Role.R, Role.P, Role.D)
    }
    return ClusterSpec(
        tuple(
            _renamed(waiting[_plain(wanted.role)].pop(0), wanted.name, wanted.role)
            for wanted in topology.nodes
        )
    )


def _plain(role: Role) -> Role:
    return Role.D if role is Role.PD else role


def _renamed(node: Node, name: str, role: Role) -> Node:
    return replace(node, name=name, role=role)


@dataclass(frozen=True, slots=True)
class Launching:
    """vLLM nodes of our own, which end with the sweep. ``say`` is told when a node is ready."""

    options: LaunchOptions
    logs: Path
    say: Callable[[str], None] = lambda _: None

    @property
    def start_s(self) -> float:
        return 90.0

    def identity(self, shapes: Sequence[Topology]) -> EngineIdentity:  # noqa: ARG002
        options = self.options
        version, _ = engine_version(find_python(options.vllm, options.device))
        return EngineIdentity(
            backend="vllm",
            engine="vllm",
            engine_version=version,
            model=options.model or NAME,
            dtype=options.dtype,
            gpu="cpu" if options.device is Device.CPU else gpu_name(),
            connector=options.connector,
            block_size=block_tokens(options),
            flags={
                "dummy_weights": options.dummy_weights,
                "engine_args": list(options.engine_args),
                "max_model_len": options.max_model_len,
                "pull": options.pull,
                "tensor_parallel": {str(k): v for k, v in options.tensor_parallel.items()},
            },
        )

    def open(self, shape: Topology) -> AbstractContextManager[Cluster]:
        self.say(f"starting {shape}")
        return launch(shape, self.options, self.logs / str(shape), self.say)


def block_tokens(options: LaunchOptions) -> int:
    """The KV block size that vLLM will use: the last one given wins.

    Raises:
        UsageError: ``--block-size`` is given and is no number.
    """
    tokens = CPU_BLOCK_TOKENS if options.device is Device.CPU else GPU_BLOCK_TOKENS
    for text, following in zip(options.engine_args, (*options.engine_args[1:], ""), strict=False):
        if argument_name(text) == "--block-size":
            given = text.partition("=")[2] or following
            if not given.isdecimal():
                raise UsageError(f"--engine-arg {text}: {given!r} is no number of tokens; as in "
                                 "--engine-arg=--block-size=32")  # fmt: skip
            tokens = int(given)
    return tokens


def gpu_name() -> str | None:
    """What the driver calls the first GPU; ``None`` where there is none to ask."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = subprocess.run(  # noqa: S603
        [program, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = asked.stdout.splitlines()
    return names[0].strip() if names else None


@dataclass(frozen=True, slots=True)
class Attaching:
    """Nodes that are already there. What they do not say of themselves may be told."""

    spec: ClusterSpec
    gpu: str | None = None
    dtype: str | None = None
    connector: str | None = None

    @property
    def start_s(self) -> float:
        return 0.0

    def identity(self, shapes: Sequence[Topology]) -> EngineIdentity:
        have = shape_of(self.spec.topology)
        for shape in shapes:
            if sorted(shape.parts) != sorted(have.parts):
                raise UsageError(
                    f"the attached cluster is {have} and the grid wants {shape}; "
                    "attach one of that shape, or choose another grid"
                )
        facts = probe(self.spec.nodes[0])
        return EngineIdentity(
            backend="attach",
            engine="vllm" if facts.block_size is not None else "openai",
            engine_version=facts.version,
            model=facts.model,
            dtype=self.dtype,
            gpu=self.gpu,
            connector=self.connector,
            block_size=facts.block_size,
        )

    @contextmanager
    def open(self, shape: Topology) -> Iterator[Cluster]:  # noqa: ARG002
        """Every P must reach every D, which no start of ours has tried.

        Raises:
            EngineError: a node does not answer, or a hand-off does not get there.
        """
        cluster = Cluster(self.spec)
        if sick := cluster.sick():
            raise EngineError(
                f"{', '.join(sick)} did not answer the health check before the first point; "
                "see that it runs and is reachable from here"
            )
        preflight(self.spec, cluster.facts.model)
        yield cluster
