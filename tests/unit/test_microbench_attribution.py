"""The published test: what is sent, what is measured, what a control is said to remove."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdbench.core.errors import UsageError
from ppdbench.experiments.microbench.attribution import (
    CONTROLS,
    PUBLISHED,
    Shot,
    ShotScript,
    shots,
)
from ppdbench.experiments.microbench.attribution_report import (
    Results,
    ShotResult,
    control_row,
    finding,
    slowdown_rows,
    untestable,
)
from ppdbench.experiments.microbench.attribution_run import (
    Attribution,
    AttributionPlan,
    default_batches,
    measure_attribution,
    simulate_attribution,
)
from ppdbench.experiments.microbench.live import token_ids
from ppdbench.experiments.microbench.plan import Limits
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.sim.config import SimConfig

CASCADE_OFF, DISTINCT, HALF, _, _ = CONTROLS


def fired(shot: Shot):
    """What a shot sends once its prefixes are cached."""
    script = ShotScript(shot, seed=0)
    primes = script.begin()
    asks = []
    for prime in primes:
        asks = script.ended(prime.name)
    return primes, asks


def test_the_published_form_is_sent_as_published():
    """B decodes over one 2,048-token prefix, and N full prompts without or appends with it."""
    primes, full = fired(Shot(PUBLISHED, 3, 2, "full", 0))
    _, append = fired(Shot(PUBLISHED, 3, 2, "append", 0))

    assert [ask.prompt_tokens for ask in primes] == [2048]
    assert [ask.prompt_tokens for ask in full] == [2064] * 3 + [1024] * 2
    assert [ask.prompt_tokens for ask in append] == [2064] * 3 + [3072] * 2
    assert len({ask.prompt[0] for ask in append}) == 1
    assert {ask.output_tokens for ask in append} == {64}


def test_the_controls_change_one_thing_each():
    """Distinct prefixes are all primed; half a shared prefix is the front of the whole one."""
    primes, asks = fired(Shot(DISTINCT, 3, 1, "append", 0))
    _, half = fired(Shot(HALF, 3, 1, "full", 0))

    assert len(primes) == len({ask.prompt[0] for ask in asks}) == 4
    whole, front = half[0].prompt[0], half[-1].prompt[0]
    assert token_ids([whole], 5)[:1024] == token_ids([front], 5)


def results(slowdowns, form=PUBLISHED, batch=200, repeats=6):
    """A base of 10 ms with a little noise, and arms that are slower by what is given."""
    rng = np.random.default_rng(1)
    for repeat in range(repeats):
        noise = 1 + 0.002 * rng.standard_normal()
        for arm, slowdown in {"base": 0.0, **slowdowns}.items():
            shot = Shot(form, batch, 0 if arm == "base" else 1, arm, repeat)
            tpot_s = 0.01 * noise * (1 + slowdown)
            yield ShotResult(shot, tpot_s, np.full(63, tpot_s), 0.1, proven=True)


def test_a_control_that_halves_the_gap_removes_half_of_it():
    """The share removed is that of full − append, with an interval; the sentence says it."""
    found = Results(
        [
            *results({"full": 0.50, "append": 0.10}),
            *results({"full": 0.30, "append": 0.10}, DISTINCT),
        ]
    )
    row = control_row(found, PUBLISHED, DISTINCT, 200, seed=0)

    assert row["gap_before"] == pytest.approx(0.40)
    assert row["removed"] == pytest.approx(0.5, abs=0.01)
    assert row["removed_ci"][0] <= row["removed"] <= row["removed_ci"][1]
    assert "distinct prefixes removes 50% of the gap" in finding([], [row])


def test_without_a_gap_nothing_can_be_removed():
    """Where full and append did not differ the share is unknown, never 0."""
    found = Results(
        [*results({"full": 0.1, "append": 0.1}), *results({"full": 0.1, "append": 0.1}, DISTINCT)]
    )
    row = control_row(found, PUBLISHED, DISTINCT, 200, seed=0)

    assert row["removed"] is None
    assert "nothing to remove" in row["reason"]


@pytest.mark.parametrize(
    ("full", "repeats", "reason"),
    [(0.5, 1, "one repeat has no interval"), (0.1, 6, "less than append here")],
)
def test_a_gap_that_is_not_the_published_one_is_not_removed(full, repeats, reason):
    """A single repeat shows none, and one the other way round is named as such."""
    arms = {"full": full, "append": 0.3}
    found = Results(
        [
            *results(arms, repeats=repeats),
            *results({"full": 0, "append": 0}, DISTINCT, 200, repeats),
        ]
    )
    row = control_row(found, PUBLISHED, DISTINCT, 200, seed=0)

    assert row["removed"] is None
    assert reason in row["reason"]


def test_rows_give_the_slowdown_over_the_base_of_the_same_repeat():
    """One row per kind, with the interval over repeats."""
    rows = slowdown_rows(Results(results({"full": 0.48, "append": 0.02})), seed=0)

    assert {r["kind"]: r["slowdown_mean"] for r in rows} == {
        "full": pytest.approx(0.48), "append": pytest.approx(0.02),
    }  # fmt: skip
    assert rows[0]["new_tokens"] == 1024
    assert "full +48%, append +2%" in finding(
        rows, [{**untestable("no GPU"), "control": "x", "batch": 200}]
    )


def test_what_an_engine_cannot_switch_or_hold_is_not_testable_and_says_why():
    """A missing switch and too little memory are reasons; a protocol that cannot run is refused."""
    plan = AttributionPlan((8,), 8, injected=(1,), repeats=1, no_cascade_switch="no cascade here")
    roomy = Attribution(plan, Limits(context_tokens=8192, kv_tokens=10_000, block_tokens=16))
    fitting = roomy.fitting()
    rows = {row["control"]: row for row in roomy.document()["controls"]}

    assert {shot.form.cascade for shot in fitting} == {True}
    assert rows["cascade_off"]["reason"] == "no cascade here"
    assert "KV exceed" in rows["distinct_prefixes"]["reason"]
    assert any(item["prefix_tokens"] == 65536 for item in roomy.document()["skipped"])
    with pytest.raises(UsageError, match="does not fit"):
        Attribution(plan, Limits(context_tokens=2048)).fitting()


def test_the_controls_stand_at_the_papers_batch():
    """200 where it is measured, else the largest."""
    assert default_batches((), cpu=False)[1] == 200
    assert default_batches((8, 16), cpu=False) == ((8, 16), 16)


def test_the_base_stands_once_per_batch_and_repeat():
    """N full and N append share it."""
    listed = list(shots(PUBLISHED, (8, 16), (1, 2), 3))

    assert len(listed) == 3 * 2 * (1 + 2 * 2)
    assert sum(shot.arm == "base" for shot in listed) == 6


def test_in_the_simulator_the_gap_is_cascade_attention():
    """With the switch on a full prompt hurts far more; without it, or for a token, it does not."""
    plan = AttributionPlan((64,), 64, injected=(1,), long_prefixes=(), repeats=2)
    engines = {on: SimulatedEngine(SimConfig(), seed=0, cascade=on) for on in (True, False)}
    document = simulate_attribution(plan, engines, keep_records=False).document()
    removed = {row["control"]: row["removed"] for row in document["controls"]}
    slow = {(r["form"], r["kind"]): r["slowdown_mean"] for r in document["rows"]}

    assert document["failed_shots"] == document["unproven_shots"] == 0
    assert slow["published", "full"] > 5 * slow["published", "append"]
    assert removed["cascade_off"] == pytest.approx(1, abs=0.1)
    assert removed["distinct_prefixes"] == pytest.approx(1, abs=0.1)
    assert 0.2 < removed["full_shares_half_the_prefix"] < 0.8
    assert removed["equal_new_tokens"] == pytest.approx(0, abs=0.1)


def test_long_prefixes_are_a_form_of_their_own():
    """A longer prefix never mixes with the published one."""
    long = replace(PUBLISHED, prefix_tokens=8192)

    assert Shot(long, 8, 1, "full", 0).name != Shot(PUBLISHED, 8, 1, "full", 0).name


async def test_no_engine_is_started_once_time_is_over():
    """Its control then says that no repeat of it was whole, and costs no launch."""
    started = []

    class Refusing:
        async def run(self, script):
            return []

    async def engines():
        for cascade in (True, False):
            started.append(cascade)
            yield cascade, Refusing(), Limits()

    plan = AttributionPlan((8,), 8, injected=(1,), long_prefixes=(), repeats=1)
    found = await measure_attribution(plan, engines(), lambda _: None, lambda: True)
    document = found.document()
    rows = {row["control"]: row for row in document["controls"]}

    assert started == [True]
    assert document["left_out_shots"] == len(found.fitting()) - 1
    assert rows["cascade_off"]["reason"] == "no repeat of it was whole"
