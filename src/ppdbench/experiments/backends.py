"""Where a sweep's points are measured: a backend takes points and yields what it measured."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ppdbench.core.topology import Topology
from ppdbench.experiments.measuring import Measured, Measuring
from ppdbench.experiments.policies import policy_of
from ppdbench.experiments.workers import in_parallel
from ppdbench.load.simulated import run_simulated_point
from ppdbench.runs.manifest import EngineIdentity
from ppdbench.runs.points import PointKey
from ppdbench.sim.config import SimConfig
from ppdbench.sim.prepare import capacity_for, cost_source

SIMULATION_START_S = 4.0
SIMULATED_TURN_S = 150e-6
"""Start of the worker processes, and one turn on one core: measured on a 2-core laptop."""


class Backend(Protocol):
    """What a sweep asks of a backend."""

    @property
    def measuring(self) -> Measuring:
        """Which grid, with which seed."""
        ...

    def identity(self) -> EngineIdentity:
        """For the manifest. Raises PpdError for what can never work, before anything runs."""
        ...

    def expected_s(self, keys: Sequence[PointKey]) -> float:
        """A rough forecast of the wall time of :meth:`measure`."""
        ...

    def measure(
        self, keys: Sequence[PointKey], wants: Callable[[PointKey], bool] | None = None
    ) -> Generator[Measured]:
        """Each key once, in any order. A failed point is yielded with its cause, not raised.

        ``wants`` is asked before a point begins, when all earlier repeats of its place have been
        yielded; a point that is not wanted is left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class SimulatedBackend:
    """Points on simulated nodes, over the cores: equal seeds give equal bytes.

    ``traces`` is a folder for a Chrome trace of each point.
    """

    measuring: Measuring
    config: SimConfig
    jobs: int = 1
    traces: Path | None = None

    def identity(self) -> EngineIdentity:
        capacity_for(self.config)
        return EngineIdentity(
            backend="sim",
            engine="simulator",
            engine_version=cost_source(self.config),
            model=self.config.model,
            dtype="bfloat16",
            gpu=self.config.gpu,
            connector=self.config.connector,
            block_size=self.config.block_tokens,
            flags=self.config.as_dict(),
        )

    def expected_s(self, keys: Sequence[PointKey]) -> float:
        turns = self.measuring.grid.expected_turns(keys)
        return SIMULATION_START_S + turns * SIMULATED_TURN_S / self.jobs

    def measure(
        self, keys: Sequence[PointKey], wants: Callable[[PointKey], bool] | None = None
    ) -> Generator[Measured]:
        if wants is None:
            yield from self._measure_all(keys)
            return
        for repeat in sorted({key.repeat for key in keys}):
            wanted = [key for key in keys if key.repeat == repeat and wants(key)]
            yield from self._measure_all(wanted)

    def _measure_all(self, keys: Sequence[PointKey]) -> Iterator[Measured]:
        return in_parallel(self._measure_one, sorted(keys, key=_by_schedule), self.jobs)

    def _measure_one(self, key: PointKey) -> Measured:
        outcome = run_simulated_point(
            Topology.parse(key.topology),
            policy_of(key),
            self.measuring.arrivals(key),
            key.rate_per_s,
            self.config,
            self.measuring.seed_of(key),
            trace=self.traces / f"{key.slug}.json" if self.traces else None,
            users=self.measuring.grid.users(key),
        )
        return self.measuring.finish(key, outcome)


def _by_schedule(key: PointKey) -> tuple[str, float, int]:
    return key.workload, key.rate_per_s, key.repeat
