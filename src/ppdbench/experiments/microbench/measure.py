"""From token instants to rows: what a dose did to the victims that were there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.seeds import seed_for
from ppdbench.core.statistics import Interval, bootstrap
from ppdbench.experiments.microbench.plan import WINDOW_TOKENS, Cell, Dose, Kind
from ppdbench.runs.records import TurnRecord

Floats = NDArray[np.float64]


ITL_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 1.0)
"""Shares at which a row keeps the distribution of its gaps."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One dose in one repeat. Gaps are seconds between successive tokens of a victim.

    ``dosed`` holds the victims' gaps from the injection to the last of their next 64 tokens,
    ``quiet`` those of the *same* victims just before the injection and just after the dose.
    ``victim_tokens`` is how many tokens a victim had made by then, in the mean.
    """

    cell: Cell
    repeat: int
    dosed: Floats
    quiet: Floats
    injected_ttft_s: float
    victim_tokens: float
    cached_tokens: tuple[int | None, ...]

    @property
    def slowdown(self) -> float:
        """Mean TPOT under the dose over mean quiet TPOT, less one: 0.48 is 48 %."""
        return float(self.dosed.mean() / self.quiet.mean()) - 1

    @property
    def stall_s(self) -> float:
        """Seconds by which the dose delayed a victim's window."""
        return float((self.dosed.mean() - self.quiet.mean()) * WINDOW_TOKENS)


def effect_of(
    cell: Cell,
    repeat: int,
    victims: Iterable[Floats],
    injected: Sequence[TurnRecord],
    quiet_tokens: int,
) -> Effect | None:
    """Measure one dose; ``None`` when a victim or an injected request lacks what it takes.

    ``victims`` are the token instants of each.
    """
    if not all(record.ok for record in injected):
        return None
    begin_s = injected[0].sent_at_s
    last_sent_s = injected[-1].sent_at_s
    end_s = max(record.finished_at_s or record.sent_at_s for record in injected)
    given = list(victims)
    windows = [_windows(victim, begin_s, last_sent_s, end_s, quiet_tokens) for victim in given]
    whole = [window for window in windows if window is not None]
    if not whole or len(whole) < len(windows):
        return None
    return Effect(
        cell,
        repeat,
        np.concatenate([dosed for dosed, _ in whole]),
        np.concatenate([quiet for _, quiet in whole]),
        fmean(record.ttft_sent_s or 0.0 for record in injected),
        fmean(float(np.searchsorted(victim, begin_s)) for victim in given),
        tuple(record.cached_tokens for record in injected),
    )


def _windows(
    instants: Floats, begin_s: float, last_sent_s: float, end_s: float, quiet: int
) -> tuple[Floats, Floats] | None:
    """Gaps under the dose, and quiet gaps around it, of one victim.

    Quiet tokens that all came in one read show a client that got no time, and are no control.
    """
    begun, last_begun, ended = np.searchsorted(instants, (begin_s, last_sent_s, end_s), "right")
    first = int(begun) - 1
    last = int(last_begun) - 1 + WINDOW_TOKENS
    after = max(last, int(ended))
    if first < quiet or last >= len(instants):
        return None
    before_gaps = np.diff(instants[first - quiet : first + 1])
    after_gaps = np.diff(instants[after : after + quiet + 1])
    quiet_gaps = np.concatenate([before_gaps, after_gaps])
    if not quiet_gaps.any():
        return None
    return np.diff(instants[first : last + 1]), quiet_gaps


def proven(dose: Dose, cached_tokens: Sequence[int | None], block_tokens: int) -> bool | None:
    """Was exactly the context cached, to the block? ``None`` when the engine did not say.

    The engine may always compute at least one token of a prompt, so a context that ends the
    prompt is not expected to hit wholly; doses have new tokens, so it does here.
    """
    if any(cached is None for cached in cached_tokens):
        return None
    expected = dose.context_tokens // block_tokens * block_tokens
    return all(cached == expected for cached in cached_tokens)


def row(effects: Sequence[Effect], *, doses: int, block_tokens: int, seed: int) -> dict[str, Any]:
    """One cell's row over its repeats; the interval resamples repeats."""
    cell = effects[0].cell
    slowdown = _slowdown(effects, seed)
    dosed, quiet = (np.concatenate([getattr(e, name) for e in effects]) for name in _SIDES)
    return {
        "kind": cell.dose.kind.value,
        "batch": cell.batch,
        "context_tokens": cell.dose.context_tokens,
        "new_tokens": cell.dose.new_tokens,
        "repeats": len(effects),
        "slowdown_mean": slowdown.estimate,
        "slowdown_ci": interval_of(slowdown),
        "tpot_quiet_s": float(quiet.mean()),
        "tpot_dosed_s": float(dosed.mean()),
        "itl_quiet_p50_s": float(np.quantile(quiet, 0.5)),
        "itl_quiet_p99_s": float(np.quantile(quiet, 0.99)),
        "itl_p50_s": float(np.quantile(dosed, 0.5)),
        "itl_p99_s": float(np.quantile(dosed, 0.99)),
        "itl_quiet_curve_s": np.quantile(quiet, ITL_SHARES).tolist(),
        "itl_curve_s": np.quantile(dosed, ITL_SHARES).tolist(),
        "max_gap_s": float(dosed.max()),
        "max_gap_mean_s": fmean(float(e.dosed.max()) for e in effects),
        "stall_s_per_injected": fmean(e.stall_s for e in effects) / doses,
        "injected_ttft_s": fmean(e.injected_ttft_s for e in effects),
        **_proof(effects, block_tokens),
    }


_SIDES = ("dosed", "quiet")


def _proof(effects: Sequence[Effect], block_tokens: int) -> dict[str, Any]:
    """Cached tokens as counted by the server: the least and the most, and whether they fit."""
    counts = [count for effect in effects for count in effect.cached_tokens]
    known = [count for count in counts if count is not None]
    return {
        "cached_tokens_min": min(known, default=None),
        "cached_tokens_max": max(known, default=None),
        "cache_proven": proven(effects[0].cell.dose, counts, block_tokens),
    }


def interval_of(interval: Interval) -> list[float] | None:
    """As JSON: ``None`` where one repeat leaves the interval without bounds."""
    bounds = [interval.low, interval.high]
    return bounds if np.isfinite(bounds).all() else None


def _slowdown(effects: Sequence[Effect], seed: int) -> Interval:
    columns = [np.array([getattr(e, side).mean() for e in effects]) for side in _SIDES]
    return bootstrap(columns, _ratio_less_one, seed=seed)


def _ratio_less_one(dosed: Floats, quiet: Floats, axis: int = -1) -> Floats:
    ratio: Floats = dosed.mean(axis) / quiet.mean(axis) - 1
    return ratio


def sample(effect: Effect) -> dict[str, Any]:
    """One dose in one repeat, as a fit of costs wants it."""
    dose = effect.cell.dose
    return {
        "kind": dose.kind.value,
        "batch": effect.cell.batch,
        "context_tokens": dose.context_tokens,
        "new_tokens": dose.new_tokens,
        "repeat": effect.repeat,
        "tpot_quiet_s": float(effect.quiet.mean()),
        "tpot_dosed_s": float(effect.dosed.mean()),
        "injected_ttft_s": effect.injected_ttft_s,
        "victim_made_tokens": effect.victim_tokens,
    }


def rows_of(
    effects: Iterable[Effect], *, doses: int, block_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Every cell's row, in the order of batch, then kind, context and new tokens."""
    by_cell = group(effects)
    return [
        row(by_cell[cell], doses=doses, block_tokens=block_tokens, seed=_seed(seed, cell))
        for cell in sorted(by_cell, key=lambda cell: (cell.batch, cell.dose))
    ]


def group(effects: Iterable[Effect]) -> dict[Cell, list[Effect]]:
    by_cell: dict[Cell, list[Effect]] = {}
    for effect in effects:
        by_cell.setdefault(effect.cell, []).append(effect)
    return by_cell


def comparisons(effects: Iterable[Effect], seed: int) -> list[dict[str, Any]]:
    """For each append: how much more the full prompt of the same total length slows the victims.

    ``difference`` is slowdown(full) − slowdown(append) in fractions, with an interval over
    repeats drawn on both sides; ``significant`` when the interval lies above 0.
    """
    by_cell = group(effects)
    found = []
    for cell in sorted(by_cell, key=lambda cell: (cell.batch, cell.dose)):
        twin = Cell(cell.batch, Dose(Kind.FULL, 0, cell.dose.prompt_tokens))
        if cell.dose.kind is Kind.APPEND and twin in by_cell:
            found.append(_comparison(cell, by_cell[twin], by_cell[cell], seed))
    return found


def _comparison(
    cell: Cell, full: Sequence[Effect], append: Sequence[Effect], seed: int
) -> dict[str, Any]:
    difference = _paired(full, append, _seed(seed, cell))
    return {
        "batch": cell.batch,
        "context_tokens": cell.dose.context_tokens,
        "new_tokens": cell.dose.new_tokens,
        "slowdown_full": _slowdown(full, seed).estimate,
        "slowdown_append": _slowdown(append, seed).estimate,
        "difference": difference.estimate,
        "difference_ci": interval_of(difference),
        "significant": bool(np.isfinite(difference.low) and difference.low > 0),
    }


def _paired(full: Sequence[Effect], append: Sequence[Effect], seed: int) -> Interval:
    """Repeats are paired: both doses of a repeat met the same batch size, order and seed."""
    at = {effect.repeat: effect for effect in append}
    pairs = [(effect, at[effect.repeat]) for effect in full if effect.repeat in at]
    columns = [
        np.array([getattr(pair[place], side).mean() for pair in pairs])
        for place in (0, 1)
        for side in _SIDES
    ]
    return bootstrap(columns, _difference, seed=seed)


def _difference(
    full: Floats, full_quiet: Floats, append: Floats, append_quiet: Floats, axis: int = -1
) -> Floats:
    first, second = (
        _ratio_less_one(*s, axis) for s in ((full, full_quiet), (append, append_quiet))
    )
    return first - second


def _seed(seed: int, cell: Cell) -> int:
    dose = cell.dose
    return seed_for(seed, cell.batch, dose.kind.value, dose.context_tokens, dose.new_tokens)


def sentence(compared: Sequence[Mapping[str, Any]]) -> str:
    """In words: where a full prefill hurts more than an append, where less, where neither shows."""
    if not compared:
        return (
            "No append was measured beside the full prompt of its length, so nothing is compared."
        )
    shown = sum(c["significant"] for c in compared)
    above = (
        f"A full prefill slowed decode more than the append of the same prompt in {shown} of "
        f"{len(compared)} cells (95 % interval above 0)."
    )
    parts = [above]
    below = [c for c in compared if _is_below(c)]
    rest = [c for c in compared if not c["significant"] and not _is_below(c)]
    if below:
        parts.append(f"It slowed decode less (interval below 0) at: {_places(below)}.")
    if rest:
        parts.append(f"Not shown at: {_places(rest)}.")
    if all(c["difference_ci"] is None for c in compared):
        parts.append("One repeat has no interval; ask for more with --repeats.")
    return " ".join(parts)


def _is_below(comparison: Mapping[str, Any]) -> bool:
    bounds = comparison["difference_ci"]
    return bounds is not None and bounds[1] < 0


def _places(compared: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"batch {c['batch']}, {c['context_tokens']}+{c['new_tokens']} tokens" for c in compared
    )
