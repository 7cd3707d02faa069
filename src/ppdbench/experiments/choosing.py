"""From what a user asked for to a backend: options go before the grid file's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.cluster.launch import LaunchOptions
from ppdbench.cluster.tiny_model import tiny_model
from ppdbench.core.errors import UsageError
from ppdbench.experiments.backends import Backend, SimulatedBackend
from ppdbench.experiments.clusters import Attaching, ClusterSource, Launching
from ppdbench.experiments.grid import Grid, load_grid
from ppdbench.experiments.live import LiveBackend, LiveOptions
from ppdbench.experiments.measuring import Measuring
from ppdbench.experiments.policies import check_policies
from ppdbench.experiments.workers import available_cores
from ppdbench.runs.aggregate import Limits
from ppdbench.sim.calibrated import read_calibration
from ppdbench.sim.config import SimConfig
from ppdbench.sim.prepare import BUILT_IN, capacity_for

BACKENDS = ("sim", "vllm", "attach")


@dataclass(frozen=True, slots=True)
class Choice:
    """A sweep as asked for. In ``settings``, ``None`` leaves the word to the grid file."""

    grid: str
    backend: str = "sim"
    seed: int = 0
    jobs: int = 0
    keep_records: bool = False
    traces: Path | None = None
    limits: Limits = field(default_factory=Limits)
    settings: Mapping[str, Any] = field(default_factory=dict)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    cluster: ClusterSpec | None = None
    dtype: str | None = None
    live: LiveOptions = field(default_factory=LiveOptions)


def choose_backend(
    choice: Choice, logs: Path = Path("logs"), say: Callable[[str], None] = lambda _: None
) -> Backend:
    """The backend for a choice. ``logs`` is for launched nodes, ``say`` is told what they do.

    Raises:
        UsageError: anything that cannot be: grid, backend, GPU, model, setting.
    """
    check_backend(choice.backend)
    grid = load_grid(choice.grid)
    check_policies(grid.points())
    if choice.backend == "sim":
        return _simulated(choice, grid)
    source = _source(choice, grid, logs, say)
    served = _served_tokenizer(choice) if grid.has_words else None
    if served is not None:
        grid = grid.counted_by(served)
    return LiveBackend(_measuring(choice, grid), source, choice.live, say, served)


def check_backend(name: str) -> None:
    """Raises UsageError for a backend that a sweep does not have."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; known backends: {', '.join(BACKENDS)}")


def _served_tokenizer(choice: Choice) -> str | None:
    """The folder of a launched model that has its tokenizer; ``None``: only the server knows it."""
    if choice.backend != "vllm":
        return None
    folder = tiny_model() if choice.launch.model is None else Path(choice.launch.model)
    return str(folder) if (folder / "tokenizer.json").is_file() else None


def _measuring(choice: Choice, grid: Grid, block_tokens: int | None = None) -> Measuring:
    return Measuring(
        grid,
        choice.seed,
        limits=choice.limits,
        keep_records=choice.keep_records or grid.keep_records,
        block_tokens=block_tokens,
    )


def _simulated(choice: Choice, grid: Grid) -> SimulatedBackend:
    """Recorded replies in the history are replies of which no token is the one that was made."""
    config = sim_config(grid.settings, choice.settings)
    capacity_for(config)  # an unknown GPU or model, before the grid's data is read
    if grid.engine.replies == "recorded":
        config = replace(config, retokenisation_loss=1.0)
    measuring = _measuring(choice, grid, config.block_tokens)
    jobs = choice.jobs or available_cores()
    return SimulatedBackend(measuring, config, jobs, choice.traces)


def _source(choice: Choice, grid: Grid, logs: Path, say: Callable[[str], None]) -> ClusterSource:
    if choice.backend == "vllm":
        pulls = any(key.policy == "pull" for key in grid.points())
        return Launching(replace(choice.launch, pull=choice.launch.pull or pulls), logs, say)
    if choice.cluster is None:
        raise UsageError(
            "--backend attach needs to know the nodes: --cluster FILE, or --node ROLE=URL for each"
        )
    told = choice.settings
    return Attaching(choice.cluster, told.get("gpu"), choice.dtype, told.get("connector"))


def sim_config(proposed: Mapping[str, Any], asked: Mapping[str, Any]) -> SimConfig:
    """Raises UsageError for a setting that the simulator does not have."""
    settings = {**proposed, **{name: v for name, v in asked.items() if v is not None}}
    known = {f.name for f in fields(SimConfig)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise UsageError(
            f"setting {unknown[0]!r}: the simulator has no such setting; "
            f"it has {', '.join(sorted(known))}"
        )
    costs = settings.get("costs", "measured")
    if isinstance(costs, str) and costs not in BUILT_IN:
        # A calibration brings its engine's overheads, block size and limits along.
        fitted = read_calibration(Path(costs)).config(Path(costs))
        settings = {**fitted.as_dict(), **settings}
    return SimConfig.from_dict(settings)
