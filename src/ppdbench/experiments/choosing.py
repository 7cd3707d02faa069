"""From what a user asked for to a backend: options go before the grid file's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ppdbench.core.errors import UsageError
from ppdbench.experiments.backends import Backend, SimulatedBackend
from ppdbench.experiments.grid import Grid, load_grid
from ppdbench.experiments.measuring import Measuring
from ppdbench.experiments.workers import available_cores
from ppdbench.runs.aggregate import Limits
from ppdbench.sim.config import SimConfig

BACKENDS = ("sim", "vllm", "attach")


@dataclass(frozen=True, slots=True)
class Choice:
    """A sweep as asked for. In ``settings``, ``None`` leaves the word to the grid file."""

    grid: str
    backend: str = "sim"
    seed: int = 0
    jobs: int = 0
    keep_records: bool = False
    limits: Limits = field(default_factory=Limits)
    settings: Mapping[str, Any] = field(default_factory=dict)


def choose_backend(choice: Choice) -> Backend:
    """Raises UsageError for anything that cannot be: grid, backend, GPU, model, setting."""
    if choice.backend not in BACKENDS:
        raise UsageError(
            f"unknown backend {choice.backend!r}; known backends: {', '.join(BACKENDS)}"
        )
    grid = load_grid(choice.grid)
    return _simulated(choice, grid)


def _simulated(choice: Choice, grid: Grid) -> SimulatedBackend:
    config = sim_config(grid.settings, choice.settings)
    grid.prepare()
    measuring = Measuring(
        grid,
        choice.seed,
        limits=choice.limits,
        keep_records=choice.keep_records or grid.keep_records,
        block_tokens=config.block_tokens,
    )
    return SimulatedBackend(measuring, config, choice.jobs or available_cores())


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
    return SimConfig.from_dict(settings)
