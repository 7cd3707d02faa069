"""From token instants to rows, on victims whose course is known."""

from __future__ import annotations

import numpy as np
import pytest

from ppdbench.core.decision import Route
from ppdbench.experiments.microbench.measure import (
    comparisons,
    effect_of,
    proven,
    rows_of,
    sentence,
)
from ppdbench.experiments.microbench.plan import Cell, Dose, Kind
from ppdbench.runs.records import TurnRecord

QUIET = 32
STEP_S = 0.01


def victim(stall_s: float, stalled_gap: int = 101, tokens: int = 400) -> np.ndarray:
    """A token every 10 ms; one gap is ``stall_s`` longer."""
    gaps = np.full(tokens, STEP_S)
    gaps[stalled_gap] += stall_s
    return np.cumsum(gaps)


def injected(sent_s: float, cached: int | None = 0, done_s: float = 0.05) -> TurnRecord:
    return TurnRecord(
        "dose", 1, Route.REPLICA, "r0", sent_s, sent_s, first_token_at_s=sent_s + done_s,
        finished_at_s=sent_s + done_s, cached_tokens=cached, output_tokens=1,
    )  # fmt: skip


def effect(stall_s: float, kind: Kind = Kind.FULL, repeat: int = 0, batch: int = 2, **record):
    dose = Dose(Kind.FULL, 0, 576) if kind is Kind.FULL else Dose(Kind.APPEND, 512, 64)
    victims = [victim(stall_s)] * batch
    return effect_of(Cell(batch, dose), repeat, victims, [injected(1.015, **record)], QUIET)


def test_the_slowdown_is_that_of_the_next_64_tokens():
    """One stall of 0.32 s within 64 gaps of 10 ms is a slowdown of 0.5, to rounding."""
    measured = effect(0.32)

    assert measured.slowdown == pytest.approx(0.5)
    assert measured.stall_s == pytest.approx(0.32)
    assert len(measured.dosed) == 2 * 64
    assert measured.dosed.max() == pytest.approx(0.33)
    assert measured.quiet.max() == pytest.approx(STEP_S)


def test_a_stall_outside_the_window_does_not_count():
    """The window begins with the gap in which the injection falls and holds 64 gaps."""
    cell = Cell(1, Dose(Kind.FULL, 0, 64))
    long_before, last_gap, after = (
        effect_of(cell, 0, [victim(0.32, stalled_gap=gap)], [injected(1.015)], QUIET)
        for gap in (20, 164, 230)
    )

    assert long_before.slowdown == pytest.approx(0.0)
    assert last_gap.slowdown == pytest.approx(0.5)
    assert after.slowdown == pytest.approx(0.0)


def test_a_window_that_is_not_whole_gives_nothing():
    """A victim that ended early, or a dose that failed, cannot be measured."""
    short = [victim(0.1, tokens=150)]

    assert effect_of(Cell(1, Dose(Kind.FULL, 0, 64)), 0, short, [injected(1.0)], QUIET) is None
    failed = injected(1.0)
    failed.first_token_at_s = None
    assert effect_of(Cell(1, Dose(Kind.FULL, 0, 64)), 0, [victim(0.1)], [failed], QUIET) is None


def test_a_row_pools_repeats_and_gives_an_interval():
    """The mean over repeats lies in its interval; one repeat has none."""
    stalls = (0.20, 0.32, 0.44, 0.30)
    effects = [effect(stall, repeat=i) for i, stall in enumerate(stalls)]
    row = rows_of(effects, doses=1, block_tokens=16, seed=0)[0]
    single = rows_of(effects[:1], doses=1, block_tokens=16, seed=0)[0]

    assert row["slowdown_mean"] == pytest.approx(np.mean(stalls) / 0.64)
    assert row["slowdown_ci"][0] < row["slowdown_mean"] < row["slowdown_ci"][1]
    assert single["slowdown_ci"] is None
    assert row["stall_s_per_injected"] == pytest.approx(np.mean(stalls))
    assert row["max_gap_s"] == pytest.approx(0.45)


def test_a_client_that_got_no_time_gives_no_control():
    """Quiet tokens that were all read at one instant have no pace to compare with."""
    starved = victim(0.0)
    starved[60:101] = starved[100]
    starved[164:210] = starved[209]
    cell = Cell(1, Dose(Kind.FULL, 0, 64))

    assert effect_of(cell, 0, [starved], [injected(1.015)], QUIET) is None


@pytest.mark.parametrize(
    ("kind", "cached", "verdict"),
    [(Kind.FULL, 0, True), (Kind.FULL, 16, False), (Kind.APPEND, 512, True),
     (Kind.APPEND, 496, False), (Kind.APPEND, None, None)],
)  # fmt: skip
def test_a_dose_is_proven_by_the_servers_count(kind, cached, verdict):
    """Full means nothing cached, append means the context to the block; silence proves nothing."""
    dose = Dose(Kind.FULL, 0, 576) if kind is Kind.FULL else Dose(Kind.APPEND, 512, 64)

    assert proven(dose, [cached], 16) is verdict


def test_full_and_append_of_one_length_are_compared():
    """A difference whose interval lies above 0 is significant; equal stalls are not."""
    far = [effect(0.3 + 0.01 * i, repeat=i) for i in range(6)]
    near = [effect(0.02 + 0.01 * i, Kind.APPEND, repeat=i) for i in range(6)]
    same = [effect(0.3 + 0.01 * (5 - i), Kind.APPEND, repeat=i) for i in range(6)]
    shown, hidden = comparisons([*far, *near], 0), comparisons([*far, *same], 0)

    assert shown[0]["significant"]
    assert shown[0]["difference"] == pytest.approx(0.28 / 0.64)
    assert not hidden[0]["significant"]
    assert "in 1 of 1 cells" in sentence(shown)
    assert "Not shown at: batch 2, 512+64 tokens" in sentence(hidden)


def test_cells_in_which_full_is_below_append_are_named_as_such():
    """An interval wholly below 0 is a finding of its own and not the want of one."""
    low = [effect(0.02 + 0.01 * i, repeat=i) for i in range(6)]
    high = [effect(0.3 + 0.01 * i, Kind.APPEND, repeat=i) for i in range(6)]
    said = sentence(comparisons([*low, *high], 0))

    assert "in 0 of 1 cells" in said
    assert "slowed decode less (interval below 0) at: batch 2, 512+64 tokens." in said
    assert "Not shown" not in said


def test_the_finding_says_why_nothing_could_be_shown():
    """One repeat has no interval; without appends nothing is compared."""
    single = comparisons([effect(0.3), effect(0.02, Kind.APPEND)], 0)

    assert "One repeat has no interval" in sentence(single)
    assert "so nothing is compared" in sentence([])
