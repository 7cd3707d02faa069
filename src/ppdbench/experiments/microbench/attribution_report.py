"""From shots to slowdowns, and to the part of the published gap that each control removes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.seeds import seed_for
from ppdbench.core.statistics import Interval, bootstrap
from ppdbench.experiments.microbench.attribution import Form, Shot
from ppdbench.experiments.microbench.measure import interval_of
from ppdbench.experiments.microbench.script import is_victim
from ppdbench.runs.records import TurnRecord

Floats = NDArray[np.float64]

PUBLISHED_FIGURES = {
    "paper": {"batch": 200, "injected": 1, "full": 0.48, "append": 0.02},
    "paper_four_injected": {"batch": 200, "injected": 4, "full": 0.57, "append": 0.21},
    "january_raw": {"batch": 200, "injected": 1, "full": 1.17, "append": 0.09},
}
"""Llama-3.1-8B on one H100: the paper's Figures 2 and 7, and the authors' raw run of January."""


@dataclass(frozen=True, slots=True)
class ShotResult:
    """What one shot measured on its decodes. ``proven``: cached tokens were as the arm claims."""

    shot: Shot
    tpot_s: float
    gaps_s: Floats
    injected_ttft_s: float | None
    proven: bool


def read_shot(shot: Shot, records: Iterable[TurnRecord], block_tokens: int) -> ShotResult | None:
    """Measure a shot as published: mean over decodes of (E2E − TTFT)/(tokens − 1).

    ``None`` when a request failed.
    """
    fired = [record for record in records if ".prime." not in record.conversation]
    if not fired or not all(record.ok for record in fired):
        return None
    victims = [record for record in fired if is_victim(record.conversation)]
    doses = [record for record in fired if not is_victim(record.conversation)]
    tpots = [record.tpot_s for record in victims if record.tpot_s is not None]
    if len(tpots) < len(victims):
        return None
    return ShotResult(
        shot,
        fmean(tpots),
        np.concatenate([np.diff(record.token_at_s) for record in victims]),
        fmean(record.ttft_sent_s or 0.0 for record in doses) if doses else None,
        all(_as_claimed(shot, record, block_tokens) for record in fired),
    )


def _as_claimed(shot: Shot, record: TurnRecord, block_tokens: int) -> bool:
    form = shot.form
    is_full = shot.arm == "full" and not is_victim(record.conversation)
    expected = form.shared_by_full if is_full else form.prefix_tokens
    return record.cached_tokens == expected // block_tokens * block_tokens


Key = tuple[str, int, int, int, str]


class Results:
    """Results by (form, prefix, batch, injected, arm), one per repeat."""

    def __init__(self, results: Iterable[ShotResult]) -> None:
        self._by_key: dict[Key, dict[int, ShotResult]] = {}
        for result in results:
            shot = result.shot
            key = _key(shot.form, shot.batch, shot.injected, shot.arm)
            self._by_key.setdefault(key, {})[shot.repeat] = result

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def tpots(self, *keys: Key) -> list[Floats]:
        """TPOT per repeat of each key, over the repeats that all of them have."""
        found = [self._by_key.get(key, {}) for key in keys]
        repeats = sorted(set.intersection(*map(set, found)))
        return [np.array([results[r].tpot_s for r in repeats]) for results in found]

    def of(self, key: Key) -> list[ShotResult]:
        return list(self._by_key.get(key, {}).values())


def _key(form: Form, batch: int, injected: int, arm: str) -> Key:
    return (form.name, form.prefix_tokens, batch, injected, arm)


def slowdown_rows(results: Results, seed: int) -> list[dict[str, Any]]:
    """One row per form, prefix, batch, N and kind: slowdown over the base with its interval."""
    rows = []
    for key in results:
        base = (*key[:3], 0, "base")
        columns = results.tpots(key, base)
        if key != base and len(columns[0]):
            slowdown = bootstrap(columns, _slowdown, seed=seed_for(seed, *key))
            rows.append(_row(key, slowdown, results.of(key), results.of(base)))
    return rows


def _row(
    key: Key, slowdown: Interval, dosed: Sequence[ShotResult], base: Sequence[ShotResult]
) -> dict[str, Any]:
    name, prefix, batch, injected, arm = key
    form = dosed[0].shot.form
    gaps = np.concatenate([result.gaps_s for result in dosed])
    context = {"append": prefix, "full": form.shared_by_full}[arm]
    ttfts = [r.injected_ttft_s for r in dosed if r.injected_ttft_s is not None]
    return {
        "form": name,
        "cascade": form.cascade,
        "kind": arm,
        "batch": batch,
        "injected": injected,
        "prefix_tokens": prefix,
        "context_tokens": context,
        "new_tokens": form.append_tokens if arm == "append" else form.full_tokens,
        "repeats": len(dosed),
        "slowdown_mean": slowdown.estimate,
        "slowdown_ci": interval_of(slowdown),
        "tpot_base_s": fmean(result.tpot_s for result in base),
        "tpot_dosed_s": fmean(result.tpot_s for result in dosed),
        "itl_base_p50_s": float(np.quantile(np.concatenate([r.gaps_s for r in base]), 0.5)),
        "itl_p50_s": float(np.quantile(gaps, 0.5)),
        "itl_p99_s": float(np.quantile(gaps, 0.99)),
        "max_gap_s": float(gaps.max()),
        "injected_ttft_s": fmean(ttfts) if ttfts else None,
    }


def _slowdown(dosed: Floats, base: Floats, axis: int = -1) -> Floats:
    ratio: Floats = dosed.mean(axis) / base.mean(axis) - 1
    return ratio


def _gap(base: Floats, full: Floats, append: Floats, axis: int = -1) -> Floats:
    """slowdown(full) − slowdown(append), in fractions."""
    gap: Floats = (full.mean(axis) - append.mean(axis)) / base.mean(axis)
    return gap


def _removed(*columns: Floats, axis: int = -1) -> Floats:
    """1 − gap under the control / gap without; columns are base, full, append of each."""
    base, full, append, base_after, full_after, append_after = columns
    before = _gap(base, full, append, axis)
    share: Floats = 1 - _gap(base_after, full_after, append_after, axis) / before
    return share


def control_row(
    results: Results, plain: Form, control: Form, batch: int, seed: int
) -> dict[str, Any]:
    """How much of ``plain``'s gap goes with ``control``, at one batch and one injected prompt."""
    keys = [
        _key(form, batch, 0 if arm == "base" else 1, arm)
        for form in (plain, control)
        for arm in ("base", "full", "append")
    ]
    columns = results.tpots(*keys)
    row: dict[str, Any] = {"control": control.name, "of": plain.name, "batch": batch}
    if not len(columns[0]):
        return row | untestable("no repeat of it was whole")
    before = bootstrap(columns[:3], _gap, seed=seed)
    after = bootstrap(columns[3:], _gap, seed=seed)
    row |= {
        "testable": True,
        "reason": "",
        "gap_before": before.estimate,
        "gap": after.estimate,
        "gap_ci": interval_of(after),
    }
    reason = _no_gap(before, len(columns[0]))
    if reason:
        return row | {"removed": None, "removed_ci": None, "reason": reason}
    removed = bootstrap(columns, _removed, seed=seed)
    return row | {"removed": removed.estimate, "removed_ci": interval_of(removed)}


def _no_gap(gap: Interval, repeats: int) -> str:
    """Why no part of the gap can be removed; empty where full is above append."""
    if repeats < 2:
        return NO_INTERVAL
    if gap.high < 0:
        return REVERSED
    return "" if gap.low > 0 else NO_GAP


NO_GAP = "full and append did not differ here to begin with, so there is nothing to remove"
REVERSED = "full slowed decode less than append here, which is not the published gap"
NO_INTERVAL = "one repeat has no interval, so no gap is shown; ask for more with --repeats"


def untestable(reason: str) -> dict[str, Any]:
    return {"testable": False, "reason": reason} | dict.fromkeys(
        ("gap_before", "gap", "gap_ci", "removed", "removed_ci")
    )


def finding(rows: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]]) -> str:
    """In words: the two slowdowns beside the published ones, and what each control removes."""
    return " ".join([*_beside_published(rows, controls), _removals(controls)])


def _beside_published(
    rows: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]]
) -> list[str]:
    batch = controls[0]["batch"]
    found = {
        row["kind"]: row["slowdown_mean"]
        for row in rows
        if (row["form"], row["batch"], row["injected"]) == ("published", batch, 1)
    }
    if set(found) != {"full", "append"}:
        return []
    paper, january = (PUBLISHED_FIGURES[name] for name in ("paper", "january_raw"))
    text = (
        f"As published, batch {batch}, one prompt of 1,024 tokens: full {found['full']:+.0%}, "
        f"append {found['append']:+.0%} (the paper at batch 200: {paper['full']:+.0%} and "
        f"{paper['append']:+.0%}; its raw run of January: {january['full']:+.0%} and "
        f"{january['append']:+.0%})."
    )
    return [text]


def _removals(controls: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for row in controls:
        name = str(row["control"]).replace("_", " ")
        if not row["testable"]:
            parts.append(f"{name}: not testable ({row['reason']})")
        elif row["removed"] is None:
            parts.append(f"{name}: {row['reason']}")
        else:
            parts.append(f"{name} removes {row['removed']:.0%} of the gap")
    return "; ".join(parts) + "."
