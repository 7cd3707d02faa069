"""Runs the published test and its controls on one engine, simulated or real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ppdbench.core.errors import UsageError
from ppdbench.core.seeds import seed_for
from ppdbench.experiments.microbench.attribution import (
    CONTROLS,
    EQUAL_NEW_TOKENS,
    JANUARY,
    PUBLISHED,
    Form,
    Shot,
    ShotScript,
    shots,
)
from ppdbench.experiments.microbench.attribution_report import (
    PUBLISHED_FIGURES,
    Results,
    ShotResult,
    control_row,
    finding,
    read_shot,
    slowdown_rows,
    untestable,
)
from ppdbench.experiments.microbench.live import LiveEngine
from ppdbench.experiments.microbench.plan import Limits
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.runs.records import TurnRecord

CASCADE_OFF = CONTROLS[0]
LONG_PREFIXES = (8192, 16384, 32768, 65536)
LONG_BATCH = 64


GPU_BATCHES = (10, 50, 100, 150, 200, 250)
CPU_BATCHES = (8, 32)
PAPER_BATCH = 200
"""Where the paper states its two figures."""


def default_batches(asked: tuple[int, ...], *, cpu: bool) -> tuple[tuple[int, ...], int]:
    """The main series, and the batch of the controls: the paper's, else the largest."""
    batches = asked or (CPU_BATCHES if cpu else GPU_BATCHES)
    return batches, PAPER_BATCH if PAPER_BATCH in batches else max(batches)


@dataclass(frozen=True, slots=True)
class AttributionPlan:
    """Batches of the main series, N of injected prompts, and the batch of the controls.

    ``no_cascade_switch`` says why cascade attention cannot be switched on this engine; empty where
    it can.
    """

    batches: tuple[int, ...]
    control_batch: int
    injected: tuple[int, ...] = (1, 2, 4)
    long_prefixes: tuple[int, ...] = LONG_PREFIXES
    repeats: int = 10
    seed: int = 0
    no_cascade_switch: str = ""

    def __post_init__(self) -> None:
        if min(self.batches) < 1:
            raise UsageError(
                f"the published test needs a batch of decodes, as in --batch 10,200 (with 0 there "
                f"is none to slow); got {self.batches}"
            )

    def forms(self) -> list[Form]:
        """Every form that this engine can run."""
        chosen = [PUBLISHED, JANUARY, *CONTROLS]
        return [f for f in chosen if f.cascade or not self.no_cascade_switch]

    def shots(self) -> Iterator[Shot]:
        """Main series, controls at their batch, and the series over prefix lengths."""
        for form in self.forms():
            series = form.name in {PUBLISHED.name, JANUARY.name, CASCADE_OFF.name}
            batches = sorted({*self.batches, self.control_batch}) if series else ()
            injected = self.injected if series else (1,)
            yield from shots(form, batches or (self.control_batch,), injected, self.repeats)
            if form.name in {PUBLISHED.name, CASCADE_OFF.name}:
                for tokens in self.long_prefixes:
                    long = replace(form, prefix_tokens=tokens)
                    yield from shots(long, (LONG_BATCH,), (1,), self.repeats)


def misfit(shot: Shot, limits: Limits) -> str:
    """Why a shot cannot run on this engine; empty when it can."""
    if limits.context_tokens is not None and shot.longest_tokens > limits.context_tokens:
        return f"{shot.longest_tokens} tokens exceed the engine's context {limits.context_tokens}"
    if limits.kv_tokens is not None and shot.kv_tokens > limits.kv_tokens:
        return f"{shot.kv_tokens} tokens of KV exceed the engine's {limits.kv_tokens}"
    if limits.batch is not None and shot.batch + shot.injected > limits.batch:
        return f"batch {shot.batch} exceeds the engine's {limits.batch} sequences"
    return ""


@dataclass(slots=True)
class Attribution:
    """Everything that was measured, and what could not be."""

    plan: AttributionPlan
    limits: Limits
    results: list[ShotResult] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)
    misfits: dict[tuple[str, int, int], str] = field(default_factory=dict)
    failed: int = 0
    unproven: int = 0
    left_out: int = 0

    def fitting(self) -> list[Shot]:
        """Shots that fit; a form that does not is noted with its reason, whole.

        Raises:
            UsageError: the published form itself does not fit at the controls' batch.
        """
        planned = list(self.plan.shots())
        for shot in planned:
            reason = misfit(shot, self.limits)
            if reason:
                self.misfits.setdefault(_place(shot), reason)
        blocked = self.misfits.get(
            (PUBLISHED.name, PUBLISHED.prefix_tokens, self.plan.control_batch)
        )
        if blocked:
            raise UsageError(f"the published protocol does not fit this engine: {blocked}")
        return [shot for shot in planned if _place(shot) not in self.misfits]

    def take(self, shot: Shot, records: Sequence[TurnRecord], *, keep: bool) -> None:
        result = read_shot(shot, records, self.limits.block_tokens or 1)
        if result is None:
            self.failed += 1
        elif not result.proven:
            self.unproven += 1
        else:
            self.results.append(result)
        if keep:
            self.records += [_marked(record) for record in records]

    def document(self) -> dict[str, Any]:
        """Rows, the table of controls, and the published figures beside them, as JSON."""
        results = Results(self.results)
        controls = self._controls(results)
        rows = slowdown_rows(results, self.plan.seed)
        return {
            "rows": rows,
            "controls": controls,
            "finding": finding(rows, controls),
            "published": PUBLISHED_FIGURES,
            "skipped": [
                {"form": form, "prefix_tokens": prefix, "batch": batch, "reason": reason}
                for (form, prefix, batch), reason in self.misfits.items()
            ],
            "failed_shots": self.failed,
            "unproven_shots": self.unproven,
            "left_out_shots": self.left_out,
        }

    def _controls(self, results: Results) -> list[dict[str, Any]]:
        rows = [self._control(results, PUBLISHED, control) for control in CONTROLS]
        published_as_control = replace(EQUAL_NEW_TOKENS, name=PUBLISHED.name)
        equal = self._control(results, JANUARY, published_as_control)
        return [*rows, equal | {"control": EQUAL_NEW_TOKENS.name}]

    def _control(self, results: Results, plain: Form, control: Form) -> dict[str, Any]:
        batch = self.plan.control_batch
        seed = seed_for(self.plan.seed, "control", control.name)
        head = {"control": control.name, "of": plain.name, "batch": batch}
        if not control.cascade and self.plan.no_cascade_switch:
            return head | untestable(self.plan.no_cascade_switch)
        reason = self.misfits.get((control.name, control.prefix_tokens, batch))
        if reason:
            return head | untestable(reason)
        return control_row(results, plain, control, batch, seed)


def _place(shot: Shot) -> tuple[str, int, int]:
    return (shot.form.name, shot.form.prefix_tokens, shot.batch)


def _marked(record: TurnRecord) -> TurnRecord:
    primes = ".prime." in record.conversation
    return replace(record, warm_up=True) if primes else record


def simulate_attribution(
    plan: AttributionPlan, engines: dict[bool, SimulatedEngine], *, keep_records: bool
) -> Attribution:
    """Run on simulated time; ``engines`` by whether cascade attention is on."""
    found = Attribution(plan, engines[True].limits())
    for shot in found.fitting():
        records = engines[shot.form.cascade].run(ShotScript(shot, plan.seed))
        found.take(shot, records, keep=keep_records)
    return found


async def measure_attribution(
    plan: AttributionPlan,
    engines: AsyncIterator[tuple[bool, LiveEngine, Limits]],
    tell: Callable[[str], None],
    is_over: Callable[[], bool] = bool,
) -> Attribution:
    """Run on real engines, one launch after the other; each runs the forms of its cascade.

    Repeats stand outermost, so that when ``is_over()`` every form has about as many; an engine
    that would come after that is not started.
    """
    found: Attribution | None = None
    done = 0
    async for cascade, engine, limits in engines:
        found = found or Attribution(plan, limits)
        chosen = [shot for shot in found.fitting() if shot.form.cascade is cascade]
        chosen.sort(key=lambda shot: shot.repeat)
        for place, shot in enumerate(chosen):
            if place % 20 == 0:
                tell(f"shot {place + 1} of {len(chosen)}: {shot.name}")
            found.take(shot, await engine.run(ShotScript(shot, plan.seed)), keep=True)
            done += 1
            if is_over():
                break
        if is_over():
            break
    assert found is not None
    found.left_out = len(found.fitting()) - done
    if found.left_out:
        tell(f"time is over: {found.left_out} shots are left out")
    return found
