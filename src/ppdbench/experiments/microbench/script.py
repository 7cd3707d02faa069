"""The course of one block as a state machine: told what happened, it says what to send.

Neither clock nor I/O is in here, so real engines and the simulator run the very same course.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ppdbench.experiments.microbench.plan import WINDOW_TOKENS, Block, Dose, InterferencePlan


@dataclass(frozen=True, slots=True)
class Segment:
    """``tokens`` random tokens; equal names are equal tokens everywhere in a run."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to send, ``delay_s`` from now. ``paces`` marks a victim."""

    name: str
    prompt: tuple[Segment, ...]
    output_tokens: int
    delay_s: float = 0.0
    paces: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)


class Script(Protocol):
    """What a driver calls. ``pace`` is the least number of tokens any victim has so far.

    Nothing happens before the pace is ``wanted_pace``; a driver may keep silent until then.
    """

    @property
    def done(self) -> bool: ...
    @property
    def wanted_pace(self) -> int: ...
    def begin(self) -> list[Ask]: ...
    def progressed(self, pace: int) -> list[Ask]: ...
    def ended(self, name: str) -> list[Ask]: ...


class BlockScript:
    """Prime the contexts, start the victims, let them settle; then quiet, dose, quiet, dose, …

    A dose is over when its requests have ended *and* every victim made its window's tokens. The
    driver stops the victims once :attr:`done`. ``given`` holds the doses that ran to their end,
    with the names of their requests; a victim that ends by itself ends the block, and ``left``
    holds what was not given.
    """

    def __init__(self, plan: InterferencePlan, block: Block) -> None:
        self.done = False
        self.given: list[tuple[Dose, tuple[str, ...]]] = []
        self._plan = plan
        self.block = block
        self._waiting: set[str] = set()
        self._victims_run = False
        self._pace = 0
        self.wanted_pace = plan.settle_tokens + plan.quiet_tokens
        self._now: tuple[Dose, tuple[str, ...]] | None = None
        self.left = list(block.doses)

    @property
    def title(self) -> str:
        return f"{self.block.batch} victims, repeat {self.block.repeat + 1}"

    def begin(self) -> list[Ask]:
        contexts = sorted({dose.context_tokens for dose in self.left} - {0})
        primes = [self._prime(n, i) for n in contexts for i in range(self._plan.doses)]
        self._waiting = {ask.name for ask in primes}
        return primes or self._victims()

    def progressed(self, pace: int) -> list[Ask]:
        self._pace = pace
        return self._step()

    def ended(self, name: str) -> list[Ask]:
        self._waiting.discard(name)
        if not self._victims_run:
            return [] if self._waiting else self._victims()
        if is_victim(name):
            self._cut_short()
            return []
        if not self._waiting and self._plan.dose_rate_per_s is not None:
            # Only now is it certain that the last of them was sent.
            self.wanted_pace = max(self.wanted_pace, self._pace + WINDOW_TOKENS + 1)
        return self._step()

    def _cut_short(self) -> None:
        if self._now is not None:
            self.left.insert(0, self._now[0])
            self._now = None
        self.done = True

    def _step(self) -> list[Ask]:
        if self._pace < self.wanted_pace or self._waiting or not self._victims_run:
            return []
        if self._now is not None:
            self._close_dose()
            return []
        if not self.left:
            self.done = True
            return []
        return self._give(self.left.pop(0))

    def _close_dose(self) -> None:
        assert self._now is not None
        self.given.append(self._now)
        self._now = None
        self.wanted_pace = self._pace + self._plan.quiet_tokens

    def _give(self, dose: Dose) -> list[Ask]:
        label = f"{self.block.name}.dose{len(self.given)}"
        asks = [self._injected(dose, f"{label}.{i}", i) for i in range(self._plan.doses)]
        names = tuple(ask.name for ask in asks)
        self._now = (dose, names)
        self._waiting = set(names)
        # One token more than the window: the first gap of the window ends at the token after it.
        self.wanted_pace = self._pace + WINDOW_TOKENS + 1
        return asks

    def _injected(self, dose: Dose, name: str, place: int) -> Ask:
        rate = self._plan.dose_rate_per_s
        context = (_context(dose.context_tokens, place),) if dose.context_tokens else ()
        return Ask(
            name,
            (*context, Segment(f"new/{name}", dose.new_tokens)),
            self._plan.dose_output_tokens,
            delay_s=0.0 if rate is None else place / rate,
        )

    def _prime(self, context_tokens: int, place: int) -> Ask:
        name = f"{self.block.name}.prime{context_tokens}.{place}"
        return Ask(name, (_context(context_tokens, place),), 1)

    def _victims(self) -> list[Ask]:
        self._victims_run = True
        return [self._victim(i) for i in range(self.block.batch)]

    def _victim(self, place: int) -> Ask:
        name = f"{self.block.name}.victim{place}"
        return Ask(name, self._victim_prompt(name), self._plan.victim_output_tokens, paces=True)

    def _victim_prompt(self, name: str) -> tuple[Segment, ...]:
        tokens = self._plan.victim_context_tokens
        if not self._plan.shared_prefix or tokens < 2:
            return (Segment(f"victim/{name}", tokens),)
        return (Segment(f"shared/{tokens}", tokens - 1), Segment(f"victim/{name}", 1))


def _context(tokens: int, place: int) -> Segment:
    """Doses that are given together have contexts of their own, as turns of two users would."""
    return Segment(f"context/{tokens}/{place}", tokens)


def is_victim(name: str) -> bool:
    """By the names that :class:`BlockScript` gives."""
    return ".victim" in name
