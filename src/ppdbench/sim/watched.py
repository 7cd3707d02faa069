"""A node whose every step can be seen, and that can be asked to call at a given step.

The micro-benchmark needs each token's instant and wants to inject at a chosen token; the plain
node keeps neither, because a sweep needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from ppdbench.sim.config import Overheads
from ppdbench.sim.costs import CostTables
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Node, Sequence
from ppdbench.sim.prefix_cache import PrefixCache


class WatchedNode(Node):
    """``step_ends_s[k]`` is the end of step k + 1; ``on_first_token`` hears of each sequence."""

    def __init__(  # noqa: PLR0913 - as the plain node
        self,
        name: str,
        kernel: Kernel,
        costs: CostTables,
        cache: PrefixCache,
        *,
        overheads: Overheads,
        max_batched_tokens: int,
        max_sequences: int,
        on_first_token: Callable[[Sequence], None],
    ) -> None:
        super().__init__(
            name,
            kernel,
            costs,
            cache,
            overheads=overheads,
            max_batched_tokens=max_batched_tokens,
            max_sequences=max_sequences,
        )
        self.step_ends_s: list[float] = []
        self._on_first_token = on_first_token
        self._alarms: list[tuple[int, int, Callable[[], None]]] = []
        self._alarm_order = 0

    def at_step(self, step: int, act: Callable[[], None]) -> None:
        """Call ``act`` when ``step`` steps have ended; at once when they have."""
        self._alarm_order += 1
        heappush(self._alarms, (step, self._alarm_order, act))
        if step <= self.steps:
            self._kernel.at(self._kernel.now_s, self._ring)

    @property
    def step_s(self) -> float:
        """How long the last step took; 0 before there were two."""
        ends = self.step_ends_s[-2:]
        return ends[1] - ends[0] if len(ends) == 2 else 0.0

    def token_at_s(self, sequence: Sequence) -> list[float]:
        """Instants of the tokens a sequence has so far; it must not have been preempted."""
        first = sequence.start_step
        if first == 0:
            return [] if sequence.first_token_at_s < 0 else [sequence.first_token_at_s]
        last = min(self.steps, first + sequence.output_tokens - 1)
        return self.step_ends_s[first - 1 : last]

    def _steps_that_fit(self, steps: int) -> int:
        fitting = super()._steps_that_fit(steps)
        if self._alarms and self._alarms[0][0] > self.steps:
            return min(fitting, self._alarms[0][0] - self.steps)
        return fitting

    def _advance(self, steps: int) -> None:
        if steps == 1:
            self.step_ends_s.append(self._kernel.now_s)
        else:
            first, slope, start = self._first_s, self._slope_s, self._stretch_from_s
            ends = (start + i * first + slope * (i * (i - 1) / 2) for i in range(1, steps + 1))
            self.step_ends_s.extend(ends)
        super()._advance(steps)
        self._ring()

    def _ring(self, _: object = None) -> None:
        while self._alarms and self._alarms[0][0] <= self.steps:
            heappop(self._alarms)[2]()

    def _first_token(self, sequence: Sequence) -> None:
        super()._first_token(sequence)
        self._on_first_token(sequence)
