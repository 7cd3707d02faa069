"""What the interference experiment asks of an engine, decided before it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import inf

from ppdbench.core.errors import UsageError
from ppdbench.core.seeds import rng_for

WINDOW_TOKENS = 64
"""Victims are watched from the injection to the last of their next 64 tokens."""


DEFAULT_GRID = (
    (1, 4, 16, 50, 100, 200),
    (0, 256, 2048, 8192, 32768, 65536),
    (16, 64, 128, 512, 1024, 4096),
)
"""Batches, contexts and new tokens; cut to what the engine holds."""

CPU_GRID = ((1, 4, 16), (512, 2048), (32, 128, 512))
"""What a laptop measures in a few minutes."""


class Kind(StrEnum):
    """FULL: nothing of the prompt is cached. APPEND: its context is."""

    FULL = "full"
    APPEND = "append"


@dataclass(frozen=True, slots=True, order=True)
class Dose:
    """One injected prompt. A full dose has ``context_tokens`` 0 and ``new_tokens`` its prompt."""

    kind: Kind
    context_tokens: int
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """A row of the result: one dose into one batch of victims."""

    batch: int
    dose: Dose


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold; ``None`` where nobody knows."""

    context_tokens: int | None = None
    kv_tokens: int | None = None
    batch: int | None = None
    block_tokens: int | None = None
    kv_bytes_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """The grid b × n × m and how each dose is given.

    ``victim_context_tokens`` is each victim's own prompt; ``shared_prefix`` makes it the same for
    all. Quiet windows of ``quiet_tokens`` stand on both sides of each dose and are its control.
    ``doses`` requests are injected, at once or ``dose_rate_per_s`` apart.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    repeats: int = 10
    seed: int = 0
    victim_context_tokens: int = 256
    shared_prefix: bool = False
    quiet_tokens: int = 32
    settle_tokens: int = 16
    doses: int = 1
    dose_rate_per_s: float | None = None
    dose_output_tokens: int = 1
    doses_per_block: int = 6

    def __post_init__(self) -> None:
        counts = (*self.batches, *self.new_tokens, self.repeats, self.doses)
        if not counts or min(counts) < 1 or min(self.contexts, default=-1) < 0:
            raise UsageError(
                "batches, new tokens, repeats and doses must be at least 1 and contexts at least "
                f"0; got batches {self.batches}, contexts {self.contexts}, new {self.new_tokens}, "
                f"repeats {self.repeats}, doses {self.doses}"
            )
        if self.dose_rate_per_s is not None and not 0 < self.dose_rate_per_s < inf:
            raise UsageError(f"a dose rate is a number above 0 per s; got {self.dose_rate_per_s}")

    @property
    def dose_span_tokens(self) -> int:
        """Tokens a victim spends on one dose and its share of quiet, if nothing stalls."""
        return max(WINDOW_TOKENS, self.dose_output_tokens) + self.quiet_tokens

    @property
    def victim_output_tokens(self) -> int:
        """Enough for a full block, and three doses more for those that outlast their window."""
        return self.settle_tokens + (self.doses_per_block + 3) * (self.dose_span_tokens + 2)

    def doses_of_grid(self) -> list[Dose]:
        """Append of m after n, and the full prompts they are compared with (n + m, and m)."""
        pairs = list(product(self.contexts, self.new_tokens))
        full = {Dose(Kind.FULL, 0, n + m) for n, m in pairs}
        append = {Dose(Kind.APPEND, n, m) for n, m in pairs if n}
        return sorted(full | append)

    def cells(self, doses: Sequence[Dose] = ()) -> list[Cell]:
        """Every batch with every dose; ``doses`` stand for those of the grid."""
        chosen = doses or self.doses_of_grid()
        return [Cell(batch, dose) for batch, dose in product(self.batches, chosen)]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that the engine cannot take, and why, found before anything ran."""

    cell: Cell
    reason: str


def split_by_limits(
    plan: InterferencePlan, limits: Limits, doses: Sequence[Dose] = ()
) -> tuple[list[Cell], list[Skipped]]:
    """Cells that fit, and those that do not with the reason."""
    fitting, skipped = [], []
    for cell in plan.cells(doses):
        reason = misfit(plan, cell, limits)
        if reason is None:
            fitting.append(cell)
        else:
            skipped.append(Skipped(cell, reason))
    return fitting, skipped


def misfit(plan: InterferencePlan, cell: Cell, limits: Limits) -> str | None:
    """Why ``cell`` does not fit the engine; ``None`` when it does or nobody knows the limit."""
    prompt = cell.dose.prompt_tokens + plan.dose_output_tokens
    victim = plan.victim_context_tokens + plan.victim_output_tokens
    longest = max(prompt, victim)
    if limits.context_tokens is not None and longest > limits.context_tokens:
        return f"{longest} tokens exceed the engine's context of {limits.context_tokens}"
    if limits.batch is not None and cell.batch + plan.doses > limits.batch:
        return f"batch {cell.batch} + {plan.doses} exceeds the engine's {limits.batch} sequences"
    needed = cell.batch * victim + plan.doses * (prompt + sum(plan.contexts))
    if limits.kv_tokens is not None and needed > limits.kv_tokens:
        return f"{needed} tokens of KV exceed the engine's {limits.kv_tokens}"
    block = limits.block_tokens
    if block is not None and 0 < cell.dose.context_tokens < block:
        return f"a context of {cell.dose.context_tokens} is below one cache block of {block}"
    return None


@dataclass(frozen=True, slots=True)
class Block:
    """One batch of victims and the doses it gets, in order. ``attempt`` counts from 0."""

    batch: int
    repeat: int
    index: int
    doses: tuple[Dose, ...]
    attempt: int = 0

    @property
    def name(self) -> str:
        return f"b{self.batch}.r{self.repeat}.{self.index}.{self.attempt}"


def blocks(plan: InterferencePlan, cells: Iterable[Cell]) -> Iterator[Block]:
    """Every cell once per repeat, in an order shuffled by the seed, cut into blocks."""
    by_batch: dict[int, list[Dose]] = {}
    for cell in cells:
        by_batch.setdefault(cell.batch, []).append(cell.dose)
    for repeat, (batch, doses) in product(range(plan.repeats), by_batch.items()):
        order = rng_for(plan.seed, "order", repeat, batch).permutation(len(doses))
        shuffled = [doses[i] for i in order]
        for index, chunk in enumerate(_chunks(shuffled, plan.doses_per_block)):
            yield Block(batch, repeat, index, tuple(chunk))


def _chunks(items: Sequence[Dose], size: int) -> Iterator[Sequence[Dose]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
