"""Conversations of planned lengths. Their content is made only for a real engine (content.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ppdbench.core.conversation import Conversation, Turn
from ppdbench.workload.lengths import Lengths
from ppdbench.workload.think import NO_PAUSE, ThinkTime


@dataclass(frozen=True)
class FixedTurns:
    """Every conversation has the same turns: (new tokens, output tokens) each.

    Each begins with ``system_tokens``, the same for all when ``shared``.
    """

    name: str
    turns: tuple[tuple[int, int], ...]
    think: ThinkTime = NO_PAUSE
    system_tokens: int = 0
    shared: bool = True

    @cached_property
    def _plan(self) -> tuple[Turn, ...]:
        return tuple(Turn(new, output) for new, output in self.turns)

    @property
    def mean_turns(self) -> float:
        return len(self.turns)

    @property
    def mean_output_tokens(self) -> float:
        """Per conversation."""
        return sum(output for _, output in self.turns)

    def conversations(self, n: int, prefix: str, rng: np.random.Generator) -> list[Conversation]:
        """``n`` of them; without pauses they share their immutable turns, which costs ≈ 1 µs."""
        head = _head(self)
        if self.think.kind == "none":
            turns = self._plan
            return [Conversation(f"{prefix}{i}", turns, *head) for i in range(n)]
        pauses = self.think.draw(n * (len(self.turns) - 1), rng).reshape(n, -1).tolist()
        return [
            Conversation(f"{prefix}{i}", _with_pauses(self._plan, pauses[i]), *head)
            for i in range(n)
        ]


def _head(spec: FixedTurns | DrawnTurns) -> tuple[int, int, str]:
    shared = spec.system_tokens if spec.shared else 0
    return spec.system_tokens, shared, spec.name if shared else ""


def _with_pauses(plan: tuple[Turn, ...], pauses: list[float]) -> tuple[Turn, ...]:
    later = [
        Turn(turn.new_tokens, turn.output_tokens, pause)
        for turn, pause in zip(plan[1:], pauses, strict=True)
    ]
    return (plan[0], *later)


@dataclass(frozen=True)
class DrawnTurns:
    """Lengths and numbers of turns are drawn; ``first_tokens`` is Turn 1's request."""

    name: str
    turns: Lengths
    new_tokens: Lengths
    output_tokens: Lengths
    first_tokens: Lengths | None = None
    think: ThinkTime = NO_PAUSE
    system_tokens: int = 0
    shared: bool = True

    @property
    def mean_turns(self) -> float:
        return self.turns.mean

    @property
    def mean_output_tokens(self) -> float:
        return self.turns.mean * self.output_tokens.mean

    @property
    def observed(self) -> dict[str, tuple[int, ...]]:
        """The lengths that were read from files, by what they are for."""
        drawn = {
            "turns": self.turns,
            "first_tokens": self.first_tokens,
            "new_tokens": self.new_tokens,
            "output_tokens": self.output_tokens,
        }
        return {name: some.values for name, some in drawn.items() if some and some.values}

    def conversations(self, n: int, prefix: str, rng: np.random.Generator) -> list[Conversation]:
        counts = self.turns.draw(n, rng)
        starts = np.concatenate([[0], np.cumsum(counts)])
        total = int(starts[-1])
        new, output = self.new_tokens.draw(total, rng), self.output_tokens.draw(total, rng)
        pauses = self.think.draw(total, rng)
        pauses[starts[:-1]] = 0.0
        if self.first_tokens is not None:
            new[starts[:-1]] = self.first_tokens.draw(n, rng)
        turns = list(map(Turn, new.tolist(), output.tolist(), pauses.tolist()))
        bounds, head = starts.tolist(), _head(self)
        return [
            Conversation(f"{prefix}{i}", tuple(turns[bounds[i] : bounds[i + 1]]), *head)
            for i in range(n)
        ]
