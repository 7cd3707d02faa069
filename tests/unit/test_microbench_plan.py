"""The interference plan: which doses, which cells fit, in which order."""

from __future__ import annotations

from math import nan

import pytest

from ppdbench.core.errors import UsageError
from ppdbench.experiments.microbench.interference import fitting_cells
from ppdbench.experiments.microbench.plan import (
    Cell,
    Dose,
    InterferencePlan,
    Kind,
    Limits,
    blocks,
    misfit,
    split_by_limits,
)


def plan(**changes) -> InterferencePlan:
    return InterferencePlan(**{"batches": (1, 4), "contexts": (0, 512), "new_tokens": (32, 64),
                               "repeats": 3} | changes)  # fmt: skip


def test_each_append_has_a_full_prompt_of_the_same_length_beside_it():
    """A full dose has context 0 and its whole prompt as new tokens; context 0 is no append."""
    doses = plan().doses_of_grid()

    assert [d for d in doses if d.kind is Kind.APPEND] == [
        Dose(Kind.APPEND, 512, 32), Dose(Kind.APPEND, 512, 64),
    ]  # fmt: skip
    assert [d.new_tokens for d in doses if d.kind is Kind.FULL] == [32, 64, 544, 576]


def test_every_cell_comes_once_per_repeat_in_an_order_of_the_seed():
    """Nothing is lost or doubled by shuffling and cutting, and the seed decides the order."""
    cells = plan().cells()
    given = [
        (block.repeat, Cell(block.batch, dose))
        for block in blocks(plan(doses_per_block=4), cells)
        for dose in block.doses
    ]
    again = [block.doses for block in blocks(plan(doses_per_block=4), cells)]
    other = [block.doses for block in blocks(plan(doses_per_block=4, seed=1), cells)]

    assert sorted(given, key=repr) == sorted(((r, c) for r in range(3) for c in cells), key=repr)
    assert again == [block.doses for block in blocks(plan(doses_per_block=4), cells)]
    assert again != other


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(context_tokens=600), "context of 600"),
        (Limits(kv_tokens=1000), "KV exceed"),
        (Limits(batch=4), "4 sequences"),
        (Limits(block_tokens=1024), "below one cache block"),
    ],
)
def test_a_cell_that_does_not_fit_is_named_before_the_run(limits, words):
    """Context, KV, batch and block size are each checked, and the reason has the number."""
    cell = Cell(4, Dose(Kind.APPEND, 512, 64))

    assert words in (misfit(plan(), cell, limits) or "")
    assert misfit(plan(), cell, Limits()) is None


def test_a_grid_that_was_asked_for_must_fit_whole():
    """The default grid is cut to the engine; an explicit one is refused with its first misfit."""
    limits = Limits(batch=2)
    fitting, skipped = split_by_limits(plan(), limits)

    assert {cell.batch for cell in fitting} == {1}
    assert {item.cell.batch for item in skipped} == {4}
    assert fitting_cells(plan(), limits, explicit=False) == (fitting, skipped)
    with pytest.raises(UsageError, match="batch 4"):
        fitting_cells(plan(), limits, explicit=True)
    with pytest.raises(UsageError, match="do not fit"):
        fitting_cells(plan(), Limits(batch=0), explicit=False)


@pytest.mark.parametrize(
    "changes",
    [{"batches": (0,)}, {"repeats": 0}, {"dose_rate_per_s": -1.0}, {"dose_rate_per_s": nan}],
)
def test_a_senseless_plan_is_refused(changes):
    """Counts below one and rates below zero are said at once."""
    with pytest.raises(UsageError):
        plan(**changes)
