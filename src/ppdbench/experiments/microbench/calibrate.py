"""Fits the simulator's costs to an interference run, and holds a third of the cells back.

Each cell gives three equations that are linear in the coefficients: the quiet TPOT, what the dose
adds to the victims' window, and the injected request's TTFT. They are weighed by their own size,
solved without negative coefficients, and then the *simulator* plays the held-out cells: its error
there is the error that is stated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.errors import NothingUsableError, UsageError
from ppdbench.core.seeds import rng_for
from ppdbench.experiments.microbench.interference import simulate
from ppdbench.experiments.microbench.plan import (
    WINDOW_TOKENS,
    Cell,
    Dose,
    InterferencePlan,
    Kind,
)
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.sim.calibrated import HOP_FIELDS, Calibration, StepCosts, write_calibration

Floats = NDArray[np.float64]

COEFFICIENTS = (
    "step_s", "sequence_s", "token_s", "decode_token_s", "pair_s", "prefix_s", "request_s",
)  # fmt: skip
BUDGETS = (2048, 4096, 8192)
"""vLLM's usual token budgets per step; no engine tells its own, so it is fitted too."""

QUANTITIES = ("tpot_quiet_s", "tpot_dosed_s", "injected_ttft_s")
MAX_ERROR = 0.10


@dataclass(frozen=True, slots=True)
class Observed:
    """A cell's medians over its repeats; medians, because a shared machine has outliers."""

    cell: Cell
    tpot_quiet_s: float
    tpot_dosed_s: float
    injected_ttft_s: float
    victim_context_tokens: float

    @property
    def added_s(self) -> float:
        """What the dose added to a victim's window."""
        return (self.tpot_dosed_s - self.tpot_quiet_s) * WINDOW_TOKENS


def observe(document: Mapping[str, Any]) -> list[Observed]:
    """Cells of an interference document, in a stable order."""
    groups: dict[Cell, list[Mapping[str, Any]]] = {}
    for sample in document["samples"]:
        dose = Dose(Kind(sample["kind"]), sample["context_tokens"], sample["new_tokens"])
        groups.setdefault(Cell(sample["batch"], dose), []).append(sample)
    own = document["plan"]["victim_context_tokens"] + WINDOW_TOKENS / 2
    order = sorted(groups, key=lambda cell: (cell.batch, cell.dose))
    return [_observed(cell, groups[cell], own) for cell in order]


def _observed(cell: Cell, samples: Sequence[Mapping[str, Any]], own_tokens: float) -> Observed:
    def middle(name: str) -> float:
        return float(median(sample[name] for sample in samples))

    return Observed(
        cell,
        middle("tpot_quiet_s"),
        middle("tpot_dosed_s"),
        middle("injected_ttft_s"),
        own_tokens + middle("victim_made_tokens"),
    )


def hold_out(cells: Sequence[Observed], seed: int) -> tuple[list[Observed], list[Observed]]:
    """Two thirds to fit, one third to test, drawn by the seed."""
    order = rng_for(seed, "hold out").permutation(len(cells))
    tested = set(order[: len(cells) // 3].tolist())
    fitted = [cell for i, cell in enumerate(cells) if i not in tested]
    return fitted, [cells[i] for i in sorted(tested)]


def chunks_of(dose: Dose, budget: int) -> list[tuple[int, int]]:
    """(new, prefix) of each step that computes part of the prompt."""
    chunks, prefix, left = [], dose.context_tokens, dose.new_tokens
    while left > 0:
        new = min(left, budget)
        chunks.append((new, prefix))
        prefix, left = prefix + new, left - new
    return chunks


def _prompt_terms(dose: Dose, budget: int) -> Floats:
    """Coefficients of token, pair and prefix for the whole prompt."""
    chunks = chunks_of(dose, budget)
    return np.array(
        [
            float(sum(new for new, _ in chunks)),
            sum(new * (prefix + new / 2) for new, prefix in chunks),
            float(sum(prefix for _, prefix in chunks)),
        ]
    )


def equations(cell: Observed, budget: int) -> tuple[Floats, Floats]:
    """Three rows over :data:`COEFFICIENTS` and what they should give."""
    batch, dose = cell.cell.batch, cell.cell.dose
    token, pair, prefix = _prompt_terms(dose, budget - batch)
    steps = len(chunks_of(dose, budget - batch))
    decode = np.array([1.0, batch, 0.0, batch * cell.victim_context_tokens, 0.0, 0.0, 0.0])
    prompt = np.array([0.0, 0.0, token, 0.0, pair, prefix, 0.0])
    # The prompt waits for half a step on average, and its own steps carry one sequence more.
    waiting = (steps + 0.5) * decode + np.array([0.0, steps, 0, 0, 0, 0, 1.0])
    rows = np.array([decode, prompt + np.array([0.0, steps, 0, 0, 0, 0, 0]), waiting + prompt])
    return rows, np.array([cell.tpot_quiet_s, cell.added_s, cell.injected_ttft_s])


def fit(cells: Sequence[Observed], budget: int) -> tuple[StepCosts, float]:
    """Non-negative least squares on relative errors; also the loss, robust against outliers."""
    from scipy.optimize import least_squares

    made = [equations(cell, budget) for cell in cells]
    rows, values = np.concatenate([m[0] for m in made]), np.concatenate([m[1] for m in made])
    # A dose's own part is known no better than the window it stands in.
    floor = np.repeat([c.tpot_quiet_s * WINDOW_TOKENS * 0.1 for c in cells], 3)
    floor[::3] = floor[2::3] = 0.0
    weights = 1 / np.maximum(np.abs(values), floor)
    scale = 1 / np.maximum(np.abs(rows * weights[:, None]).max(axis=0), 1e-30)
    matrix = rows * weights[:, None] * scale

    def misses(x: Floats) -> Floats:
        missed: Floats = matrix @ x - values * weights
        return missed

    start = np.full(len(scale), 0.1)
    found = least_squares(misses, start, bounds=(0, np.inf), loss="soft_l1", f_scale=0.1)
    return StepCosts(*(found.x * scale).tolist()), float(found.cost)


def calibrate_from(documents: Sequence[Mapping[str, Any]], *, seed: int, into: Path) -> Calibration:
    """From an interference result and, where there is one, the idle hop of a hand-off result.

    Raises:
        UsageError: there is not exactly one interference result among ``documents``, or there is
            more than one hand-off, another kind, or one of another engine or model.
    """
    by_protocol = _one_of_each(documents)
    if "interference" not in by_protocol:
        raise UsageError(
            "a calibration needs an interference result (ppd microbench -o DIR); got "
            f"{', '.join(by_protocol) or 'none'}"
        )
    hop = by_protocol.get("handoff", {}).get("fits", {}).get("0")
    return calibrate(by_protocol["interference"], seed=seed, into=into, hop=hop)


def _one_of_each(documents: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Results that describe one engine, by protocol: none is dropped in silence.

    What a result does not say, as the GPU of attached nodes, contradicts nothing.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for document in documents:
        protocol = document["protocol"]
        if protocol in found or protocol not in _FITTED:
            raise UsageError(
                f"--from takes one interference result and at most one hand-off; got "
                f"{', '.join(str(d['protocol']) for d in documents)}"
            )
        found[protocol] = document
    for name in _ENGINE:
        values = {str(document[name]) for document in documents if document.get(name) is not None}
        if len(values) > 1:
            raise UsageError(
                f"the results to fit differ in {name}: {' and '.join(sorted(values))}; costs are "
                "those of one engine, so measure both on the same"
            )
    return found


_FITTED = ("interference", "handoff")
_ENGINE = ("engine", "engine_version", "model", "gpu")


def calibrate(
    document: Mapping[str, Any], *, seed: int, into: Path, hop: Mapping[str, Any] | None = None
) -> Calibration:
    """Fit on two thirds of the cells and test the simulator on the rest.

    ``into`` is where the file will be; the test writes it there beforehand under another name.

    Raises:
        NothingUsableError: fewer than nine cells.
    """
    cells = observe(document)
    if len(cells) < 9:
        raise NothingUsableError(
            f"a calibration needs at least 9 measured cells and the run has {len(cells)}; measure "
            "more batches, contexts and new tokens"
        )
    fitted, tested = hold_out(cells, seed)
    budget = min(BUDGETS, key=lambda b: fit(fitted, b)[1])
    made = _calibration(document, fit(fitted, budget)[0], budget, hop)
    draft = into.with_suffix(".trial")
    write_calibration(draft, made)
    try:
        errors = {
            "fitted": errors_of(predict(made, draft, document["plan"], fitted), fitted),
            "held_out": errors_of(predict(made, draft, document["plan"], tested), tested),
        }
    finally:
        draft.unlink()
    counts = {"fitted_cells": len(fitted), "held_out_cells": len(tested), "parameters": 8}
    return replace(made, fit=errors | counts)


def _calibration(
    document: Mapping[str, Any], steps: StepCosts, budget: int, hop: Mapping[str, Any] | None
) -> Calibration:
    limits = document["limits"]
    bytes_per_token = (hop or {}).get("bytes_per_token") or limits["kv_bytes_per_token"]
    if not bytes_per_token:
        raise UsageError(
            "this engine does not say how large its KV is; add a hand-off result with --from, "
            "where the connector counts bytes"
        )
    return Calibration(
        model=document["model"],
        engine=document["engine"],
        engine_version=document["engine_version"],
        block_tokens=limits["block_tokens"],
        kv_tokens=limits["kv_tokens"] or 1 << 30,
        kv_bytes_per_token=int(bytes_per_token),
        context_tokens=limits["context_tokens"] or 1 << 30,
        max_batched_tokens=budget,
        steps=steps,
        fit={},
        hop=None if hop is None else {name: max(0.0, hop[name]) for name in HOP_FIELDS},
    )


def predict(
    calibration: Calibration, path: Path, plan: Mapping[str, Any], cells: Sequence[Observed]
) -> dict[Cell, dict[str, Any]]:
    """What the simulator gives for the same cells under the same plan."""
    engine = SimulatedEngine(calibration.config(path), seed=0, cascade=False)
    names = {f: plan[f] for f in _PLANNED}
    found: dict[Cell, dict[str, Any]] = {}
    for batch in sorted({observed.cell.batch for observed in cells}):
        doses = [o.cell.dose for o in cells if o.cell.batch == batch]
        grid = InterferencePlan((batch,), (0,), (1,), repeats=4, **names)
        rows = simulate(grid, engine, explicit=True, doses=doses).document()["rows"]
        for row in rows:
            dose = Dose(Kind(row["kind"]), row["context_tokens"], row["new_tokens"])
            found[Cell(batch, dose)] = row
    return found


_PLANNED = (
    "seed", "victim_context_tokens", "shared_prefix", "quiet_tokens", "settle_tokens",
    "dose_output_tokens", "doses_per_block",
)  # fmt: skip


def errors_of(
    predicted: Mapping[Cell, Mapping[str, Any]], cells: Sequence[Observed]
) -> dict[str, Any]:
    """Median and 90th percentile of |predicted − measured| / measured, per quantity and pooled."""
    errors = {
        name: [
            abs(predicted[o.cell][name] / getattr(o, name) - 1)
            for o in cells
            if o.cell in predicted
        ]
        for name in QUANTITIES
    }
    pooled = [error for values in errors.values() for error in values]
    return {
        name: {"median": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}
        for name, values in (*errors.items(), ("all", pooled))
    }


def refuse_bad_fit(calibration: Calibration, max_error: float) -> None:
    """A simulator that is worse than stated is worse than none.

    Raises:
        NothingUsableError: the pooled median error on the held-out cells is above the bound.
    """
    found = calibration.fit["held_out"]["all"]["median"]
    if found > max_error:
        each = ", ".join(
            f"{name} {calibration.fit['held_out'][name]['median']:.1%}" for name in QUANTITIES
        )
        raise NothingUsableError(
            f"the fit misses the held-out cells by {found:.1%} in the median ({each}), more than "
            f"{max_error:.0%}; nothing was written. Measure with more --repeats on a quiet "
            "machine, or state a wider --max-error"
        )
