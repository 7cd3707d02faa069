"""Which engine a user named, and how to get hold of it: simulated, launched or attached."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppdbench.cluster.contract import named_cluster
from ppdbench.cluster.engine import engine_version, find_python
from ppdbench.cluster.launch import Cluster, LaunchOptions, launch
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.errors import UsageError
from ppdbench.core.seeds import seed_for
from ppdbench.core.topology import Topology
from ppdbench.experiments.clusters import gpu_name
from ppdbench.experiments.microbench.live import LiveEngine
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.runs.manifest import EngineIdentity
from ppdbench.sim.config import SimConfig

Told = Callable[[str], None]

CASCADE_REMOVED_VERSION = (0, 32)
"""Its ``--disable-cascade-attn`` is kept for old command lines and has no effect."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which engine. ``urls`` (role=URL) name an attached one; ``settings`` are the simulator's."""

    backend: str
    model: str | None = None
    device: str = "cuda"
    vllm: str | None = None
    gpus: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    cluster_file: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        return self.backend == "vllm" and self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Clock:
    """How long a live run may take: it ends after the block or point in which time ran out.

    What is complete by then is the result. ``None`` is no limit.
    """

    limit_s: float | None = None
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return self.limit_s is not None and time.monotonic() - self.begun_s > self.limit_s


def no_cascade_switch(chosen: Chosen) -> str:
    """Why cascade attention cannot be switched on the chosen engine; empty where it can."""
    if chosen.backend == "sim":
        return ""
    if chosen.backend == "attach":
        return (
            "the flags of an attached engine are not ours; measure it again started with "
            "--disable-cascade-attn"
        )
    if chosen.is_cpu:
        return "vLLM's attention on CPU has no cascade"
    version = engine_version(find_python(chosen.vllm, Device(chosen.device)))[1]
    if version >= CASCADE_REMOVED_VERSION:
        return f"vLLM {version[0]}.{version[1]} has no cascade attention any more"
    return ""


def sim_config(chosen: Chosen) -> SimConfig:
    """The simulator's configuration; what was not chosen is its default."""
    wanted = {"model": chosen.model, **chosen.settings}
    return SimConfig(**{name: value for name, value in wanted.items() if value is not None})


def simulated_identity(engine: SimulatedEngine) -> EngineIdentity:
    config = engine.config
    return EngineIdentity(
        backend="sim",
        engine="simulator",
        model=config.model,
        dtype="bfloat16",
        gpu=config.gpu,
        connector=config.connector,
        block_size=config.block_tokens,
        flags={"costs": config.costs, "cascade": engine.cascade},
    )


@asynccontextmanager
async def live_engine(
    chosen: Chosen, seed: int, tell: Told
) -> AsyncIterator[tuple[LiveEngine, EngineIdentity]]:
    """One node to measure: launched for the occasion, or the first R, D or pD of those named.

    Prompts differ from run to run, so that an attached engine's cache cannot know them.
    """
    with live_cluster(chosen, Topology.parse("1R"), tell) as cluster:
        node = next((n for n in cluster.nodes if n.role.decodes), None)
        if node is None:
            raise UsageError("the cluster has no R, D or pD, so nothing decodes; name one")
        facts = cluster.facts
        engine = LiveEngine(
            node.url,
            chosen.model if chosen.backend == "attach" and chosen.model else facts.model,
            seed=seed_for(seed, time.time_ns()),
            node=node.name,
            headers=node.headers(),
        )
        try:
            yield engine, live_identity(chosen, facts.version, engine.model, facts.block_size)
        finally:
            await engine.close()


def live_identity(
    chosen: Chosen, version: str | None, model: str, block_size: int | None
) -> EngineIdentity:
    return EngineIdentity(
        backend=chosen.backend,
        engine="vllm",
        engine_version=version,
        model=model,
        gpu=_gpu(chosen),
        block_size=block_size,
        flags={"engine_args": list(chosen.engine_args)},
    )


def _gpu(chosen: Chosen) -> str | None:
    """Attached nodes do not tell."""
    if chosen.backend == "attach":
        return None
    return "cpu" if chosen.device == "cpu" else gpu_name()


@contextmanager
def live_cluster(chosen: Chosen, topology: Topology, tell: Told) -> Iterator[Cluster]:
    """The nodes: launched here, or named by the user. Logs of a launch that failed are kept."""
    if chosen.backend == "attach":
        yield Cluster(named_cluster(chosen.cluster_file, chosen.urls))
        return
    logs = Path(tempfile.mkdtemp(prefix="ppd-microbench-"))
    with ExitStack() as stack:
        with ctrl_c_at_once():
            cluster = stack.enter_context(launch(topology, _launch_options(chosen), logs, tell))
        yield cluster
    shutil.rmtree(logs, ignore_errors=True)


@contextmanager
def ctrl_c_at_once() -> Iterator[None]:
    """Lets Ctrl-C end a wait that blocks a running event loop, such as that for an engine's start.

    The loop's own handler only cancels its task, which notices once the wait is over.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _launch_options(chosen: Chosen) -> LaunchOptions:
    return LaunchOptions(
        model=chosen.model,
        device=Device(chosen.device),
        gpus=chosen.gpus,
        vllm=chosen.vllm,
        engine_args=chosen.engine_args,
    )
