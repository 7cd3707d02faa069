"""The interference experiment: every block of the plan, on a real or a simulated engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ppdbench.core.errors import UsageError
from ppdbench.experiments.microbench.live import LiveEngine
from ppdbench.experiments.microbench.measure import (
    Effect,
    comparisons,
    effect_of,
    proven,
    rows_of,
    sample,
    sentence,
)
from ppdbench.experiments.microbench.plan import (
    Block,
    Cell,
    Dose,
    InterferencePlan,
    Limits,
    Skipped,
    blocks,
    split_by_limits,
)
from ppdbench.experiments.microbench.script import BlockScript, is_victim
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.runs.records import TurnRecord

Told = Callable[[str], None]

ATTEMPTS = 4
"""A machine that stalls for seconds may cost a block its victims; the rest is tried again."""


@dataclass(slots=True)
class Interference:
    """What the experiment found.

    ``unmeasured`` counts doses whose window was not whole, ``unproven`` those whose cached tokens
    were not what the dose claims, as when the context had been evicted. Neither is in a row, and a
    cell that has nothing else has no row.
    """

    plan: InterferencePlan
    limits: Limits
    skipped: list[Skipped]
    cells: list[Cell]
    effects: list[Effect] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)
    unmeasured: int = 0
    unproven: int = 0

    @property
    def block_tokens(self) -> int:
        return self.limits.block_tokens or 1

    def document(self) -> dict[str, Any]:
        """Rows, comparisons, samples and what was left out, as JSON."""
        plan = self.plan
        rows = rows_of(
            self.effects, doses=plan.doses, block_tokens=self.block_tokens, seed=plan.seed
        )
        compared = comparisons(self.effects, plan.seed)
        return {
            "rows": rows,
            "comparisons": compared,
            "finding": sentence(compared),
            "samples": [sample(effect) for effect in self.effects],
            "limits": asdict(self.limits),
            "skipped": [_skipped(item) for item in self.skipped],
            "unmeasured_doses": self.unmeasured,
            "unproven_doses": self.unproven,
            "cells_without_rows": len(set(self.cells)) - len(rows),
        }


def _skipped(item: Skipped) -> dict[str, Any]:
    dose = item.cell.dose
    return {
        "kind": dose.kind.value,
        "batch": item.cell.batch,
        "context_tokens": dose.context_tokens,
        "new_tokens": dose.new_tokens,
        "reason": item.reason,
    }


def fitting_cells(
    plan: InterferencePlan, limits: Limits, *, explicit: bool, doses: Sequence[Dose] = ()
) -> tuple[list[Cell], list[Skipped]]:
    """Cells to run. ``explicit`` grids must fit whole; the default one is cut to the engine.

    Raises:
        UsageError: a cell that was asked for does not fit, or none of the default ones does.
    """
    cells, skipped = split_by_limits(plan, limits, doses)
    if skipped and (explicit or not cells):
        first = skipped[0]
        raise UsageError(
            f"{len(skipped)} of {len(cells) + len(skipped)} cells do not fit this engine, the "
            f"first at batch {first.cell.batch}, context {first.cell.dose.context_tokens}, new "
            f"{first.cell.dose.new_tokens}: {first.reason}; ask for less with --batch, --context "
            "and --new, or give the engine more"
        )
    return cells, skipped


def simulate(
    plan: InterferencePlan,
    engine: SimulatedEngine,
    *,
    explicit: bool,
    keep_records: bool = False,
    doses: Sequence[Dose] = (),
) -> Interference:
    """Run the plan on simulated time; ``doses`` stand for those of its grid."""
    limits = engine.limits()
    cells, skipped = fitting_cells(plan, limits, explicit=explicit, doses=doses)
    found = Interference(plan, limits, skipped, cells)
    course = _Course(found, cells, keep_records=keep_records)
    for script in course.scripts():
        course.take(engine.run(script))
    return found


async def measure(  # noqa: PLR0913  (what to do, where, and how to hear of it)
    plan: InterferencePlan,
    engine: LiveEngine,
    limits: Limits,
    *,
    explicit: bool,
    tell: Told,
    is_over: Callable[[], bool] = bool,
) -> Interference:
    """Run the plan on a real engine; a warm-up block goes first and its records stand apart.

    Once ``is_over()`` the rest of the plan is left; every cell's row says how many repeats it has.
    """
    cells, skipped = fitting_cells(plan, limits, explicit=explicit)
    found = Interference(plan, limits, skipped, cells)
    found.records += await _warm_up(plan, cells, engine)
    course = _Course(found, cells, keep_records=True)
    for script in course.scripts():
        tell(f"block {course.done + 1} of {course.total}: {script.title}")
        course.take(await engine.run(script))
        if is_over():
            tell(f"time is over: {course.total - course.done} blocks are left out")
            break
    return found


async def _warm_up(
    plan: InterferencePlan, cells: Sequence[Cell], engine: LiveEngine
) -> list[TurnRecord]:
    """The largest batch with its longest doses, thrown away: allocators and caches wake up."""
    batch = max(cell.batch for cell in cells)
    longest = sorted({c.dose for c in cells if c.batch == batch}, key=lambda d: -d.prompt_tokens)
    records = await engine.run(BlockScript(plan, Block(batch, -1, 0, tuple(longest[:2]))))
    return [replace(record, warm_up=True) for record in records]


class _Course:
    """Walks the blocks; a block that was cut short is continued by another."""

    def __init__(self, found: Interference, cells: Sequence[Cell], *, keep_records: bool) -> None:
        self._found = found
        self._queue = deque(blocks(found.plan, cells))
        self._keep = keep_records
        self._script: BlockScript | None = None
        self.total = len(self._queue)
        self.done = 0

    def scripts(self) -> Iterator[BlockScript]:
        while self._queue:
            self._script = BlockScript(self._found.plan, self._queue.popleft())
            yield self._script

    def take(self, records: Sequence[TurnRecord]) -> None:
        """Measure what the last script gave."""
        script = self._script
        assert script is not None
        self.done += 1
        self._continue(script)
        by_name = {record.conversation: record for record in records}
        victims = [np.asarray(r.token_at_s) for n, r in by_name.items() if is_victim(n)]
        for dose, names in script.given:
            self._note(script.block, dose, victims, [by_name[name] for name in names])
        if self._keep:
            self._found.records += [_marked(record) for record in records]

    def _note(
        self, block: Block, dose: Dose, victims: Sequence[Any], injected: Sequence[TurnRecord]
    ) -> None:
        cell = Cell(block.batch, dose)
        effect = effect_of(cell, block.repeat, victims, injected, self._found.plan.quiet_tokens)
        if effect is None:
            self._found.unmeasured += 1
        elif not proven(dose, effect.cached_tokens, self._found.block_tokens):
            self._found.unproven += 1
        else:
            self._found.effects.append(effect)

    def _continue(self, script: BlockScript) -> None:
        """What a block that was cut short did not give goes into another, a few times over."""
        block = script.block
        if not script.left:
            return
        if block.attempt == ATTEMPTS:
            self._found.unmeasured += len(script.left)
            return
        self._queue.appendleft(replace(block, attempt=block.attempt + 1, doses=tuple(script.left)))
        self.total += 1


def _marked(record: TurnRecord) -> TurnRecord:
    """Requests that only fill the cache are warm-up."""
    return replace(record, warm_up=True) if ".prime" in record.conversation else record
