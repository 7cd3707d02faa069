"""A table in the formats of routers that decide by less, each with the price of the loss.

Read from the routers' published sources: vllm-router 0.1.17 ``PdCalibration`` (cells per path over
prompt, missing tokens and running requests), Dynamo's ``isl_bounding`` (two strict limits), llm-d's
``prefix-based-pd-decider`` (local iff the uncached suffix is below ``nonCachedTokens``; 0 would
turn disaggregation off).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, isfinite, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from ppdbench.core.decision import Features
from ppdbench.core.errors import UsageError
from ppdbench.table.lookup import Lookup
from ppdbench.table.regret import Regret, best_threshold, best_two, between, of_policy
from ppdbench.table.schema import Cell, Table
from ppdbench.table.score import REPLICATE_UNIT, Side, Status

TARGETS = ("vllm-router", "dynamo", "llm-d")
MAX_VLLM_ROUTER_CELLS = 4096
MAX_RUNNING = 1_000_000
"""Their axis is running requests and ours is arrivals per second: one rate fills all of it."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Export:
    """What the other router reads, and what it loses against the table."""

    target: str
    text: str
    regret: Regret
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VllmRouterOptions:
    """What their format wants and a table does not hold.

    ``rate_per_s`` picks the cells (the nearest measured rate; the middle one by default).
    ``tpot_limit_s`` is the p95 TPOT above which they refuse local; without it nothing is refused.
    """

    profile: str = "ppd"
    rate_per_s: float | None = None
    tpot_limit_s: float | None = None

    def __post_init__(self) -> None:
        numbers = {"--rate": self.rate_per_s, "--tpot-limit": self.tpot_limit_s}
        for name, value in numbers.items():
            if value is not None and not (isfinite(value) and value > 0):
                raise UsageError(f"{name} {value:g}: expected a number above 0")
        if not self.profile:
            raise UsageError("--profile '': expected the name that your engines report")


def export(table: Table, target: str, options: VllmRouterOptions | None = None) -> Export:
    """The table for ``target``, with the price of what that router cannot hold.

    Raises:
        UsageError: an unknown target, a table of several topologies, ``options`` for a router
            that has none of them.
    """
    if target not in TARGETS:
        raise UsageError(f"--to {target!r}: expected one of {', '.join(TARGETS)}")
    if len(table.topologies) > 1:
        raise UsageError(
            f"the table holds {', '.join(table.topologies)} and {target} has no such axis; "
            "build a table with one --base"
        )
    if options is not None and target != "vllm-router":
        raise UsageError(f"--profile, --rate and --tpot-limit are vllm-router's; {target} has none")
    if target == "dynamo":
        return _dynamo(table)
    if target == "llm-d":
        return _llm_d(table)
    return _vllm_router(table, options or VllmRouterOptions())


def _origin(table: Table) -> str:
    made = "SIMULATED figures" if table.simulated else "measured figures"
    return f"from ppd table {table.digest}, {made}, base {table.topologies[0]}"


# --- Dynamo


def _dynamo(table: Table) -> Export:
    best = best_two(table)
    limits = best.setting
    config = {
        "policy": "isl_bounding",
        "eff_isl_threshold": ceil(limits["eff_isl_threshold"]),
        "eff_isl_ratio_threshold": round(min(limits["eff_isl_ratio_threshold"], 1.0), 6),
    }
    notes = (
        _origin(table),
        "give it to --router-conditional-disagg-config, with --router-conditional-disagg",
        "its router must run in kv mode and its decode workers must publish KV events",
    )
    return Export("dynamo", json.dumps(config) + "\n", best, notes)


# --- llm-d


def _llm_d(table: Table) -> Export:
    best = best_threshold(table)
    limit = non_cached_tokens(table, best.setting["max_new_tokens"])
    text = (
        f"# {_origin(table)}\n"
        "# merge into the EndpointPickerConfig that runs your prefill and decode profiles\n"
        "apiVersion: inference.networking.x-k8s.io/v1alpha1\n"
        "kind: EndpointPickerConfig\n"
        "plugins:\n"
        "- type: prefix-based-pd-decider\n"
        "  parameters:\n"
        f"    nonCachedTokens: {limit}\n"
        "- type: disagg-profile-handler\n"
        "  parameters:\n"
        "    deciders:\n"
        "      prefill: prefix-based-pd-decider\n"
    )
    return Export("llm-d", text, best, (_origin(table), "its limit is strict: below it is local"))


def non_cached_tokens(table: Table, max_new_tokens: float) -> int:
    """llm-d's strict limit between the last local and the first remote measured value.

    At least 1: 0 means "never split" there, which is always local.
    """
    values = sorted({cell.centre["new_tokens"] for cell in table.cells})
    above = [value for value in values if value > max_new_tokens]
    if max_new_tokens <= 0:
        return 1
    return ceil(sqrt(max_new_tokens * above[0])) if above else ceil(max_new_tokens) + 1


# --- vllm-router


def _vllm_router(table: Table, options: VllmRouterOptions) -> Export:
    rate = _nearest_rate(table, options.rate_per_s)
    cells = [c for c in table.cells if c.centre["rate_per_s"] == rate and c.filled is None]
    statuses = dict(zip((c.key for c in table.cells), table.verdicts, strict=True))
    usable = [c for c in cells if statuses[c.key].status is Status.MEASURED]
    if not usable:
        raise UsageError(f"no cell at rate {rate:g} has both sides; choose another with --rate")
    limit = options.tpot_limit_s or max(_tpot_p95_s(_local(cell)) for cell in usable) * 1.001
    document = {
        "revision": table.digest,
        "profile": options.profile,
        "metric": "ttft_seconds",
        "cells": _calibration_cells(table, usable, rate),
        "local_tpot_slo_seconds": limit,
        "min_route_gain_seconds": 0.0,
        "max_prediction_error_seconds": fmean(_remote(c).ttft_s["mean"] or 0.0 for c in usable),
        "drop_re_admission_seconds": 0.0,
    }
    check_calibration(document)
    part = _at_rate(table, rate)
    regret = of_policy(part, "vllm_router", lambda c: picks_local(document, c), rate_per_s=rate)
    return Export("vllm-router", json.dumps(document, indent=1) + "\n", regret, _notes(table, rate))


def _notes(table: Table, rate: float) -> tuple[str, ...]:
    return (
        _origin(table),
        f"cells of rate {rate:g}/s for every number of running requests, because that is its axis",
        "it compares TTFT alone: weights are lost, TPOT only limits",
        "set profile to what your engines report; give it as its PD calibration",
    )


def _nearest_rate(table: Table, wanted: float | None) -> float:
    rates = sorted({cell.centre["rate_per_s"] for cell in table.cells})
    if wanted is None:
        return rates[len(rates) // 2]
    return min(rates, key=lambda rate: abs(rate - wanted))


def _at_rate(table: Table, rate: float) -> Table:
    cells = tuple(cell for cell in table.cells if cell.centre["rate_per_s"] == rate)
    return Table(table.rule, table.provenance, cells)


def _remote(cell: Cell) -> Side:
    assert cell.remote is not None
    return cell.remote


def _local(cell: Cell) -> Side:
    assert cell.local is not None
    return cell.local


def _tpot_p95_s(side: Side) -> float:
    """p99 where a source has no p95: on the safe side. The mean where it has neither."""
    named = (side.tpot_s.get(stat) for stat in ("p95", "p99", "mean"))
    return next((value for value in named if value is not None), 0.0)


def _uncertainty_s(cell: Cell) -> float:
    """One standard deviation of the TTFT difference, from the bootstrap; 0 where there is none."""
    if cell.replicates is None:
        return 0.0
    spread = float(np.std(cell.replicates["d_ttft"])) * REPLICATE_UNIT
    return spread * (_remote(cell).ttft_s["mean"] or 0.0)


def _calibration_cells(table: Table, usable: Sequence[Cell], rate: float) -> list[Document]:
    """Boxes over (prompt, missing tokens); each takes the nearest cell to its middle.

    Output tokens are no axis of theirs: the middle of the measured ones stands for all. A cold
    remote turn misses its whole prompt there, so it has one box per prompt range.
    """
    part = Table(table.rule, table.provenance, tuple(usable))
    lookup = Lookup(part)
    output = float(np.median([cell.centre["output_tokens"] for cell in usable]))
    prompts = _ranges({_prompt(cell) for cell in usable})
    misses = _ranges({cell.centre["new_tokens"] for cell in usable})
    found = []
    for low, high in prompts:
        near = [c for c in usable if low <= _prompt(c) <= high]
        found.append(_box("cold_remote", (low, high), (0, high), _mean_row(near)))
        for least, most in misses:
            if least <= high:
                middle = sqrt(max(least, 1) * max(min(most, high), 1))
                context = max(sqrt(max(low, high / 2) * high) - middle, 1.0)
                decision = lookup.decide(Features(2, int(context), int(middle), int(output), rate))
                assert decision.cell is not None
                cell = part.cells[decision.cell]
                found.append(
                    _box("local_append", (low, high), (least, min(most, high)), _row(cell))
                )
    if len(found) > MAX_VLLM_ROUTER_CELLS:
        raise UsageError(
            f"{len(found)} cells; vllm-router takes {MAX_VLLM_ROUTER_CELLS}; use a coarser table"
        )
    return found


def _prompt(cell: Cell) -> float:
    return cell.centre["context_tokens"] + cell.centre["new_tokens"]


def _ranges(values: set[float]) -> list[tuple[int, int]]:
    """Whole-number ranges that tile 0 … 2 × the largest value, cut between the values."""
    cuts = [0, *(ceil(cut) for cut in between(values)[1:-1]), ceil(max(values)) * 2 + 1]
    return [(low, high - 1) for low, high in pairwise(sorted(set(cuts)))]


Row = Mapping[str, float]


def _row(cell: Cell) -> Row:
    local = _local(cell)
    return {
        "ttft_seconds": local.ttft_s["mean"] or 0.0,
        "tpot_p95_seconds": _tpot_p95_s(local),
        "uncertainty_seconds": _uncertainty_s(cell),
    }


def _mean_row(cells: Sequence[Cell]) -> Row:
    sides = [_remote(cell) for cell in cells]
    return {
        "ttft_seconds": fmean(side.ttft_s["mean"] or 0.0 for side in sides),
        "tpot_p95_seconds": max(_tpot_p95_s(side) for side in sides),
        "uncertainty_seconds": 0.0,
    }


def _box(path: str, prompt: tuple[int, int], miss: tuple[int, int], row: Row) -> Document:
    return {
        "path": path,
        "context_min": prompt[0],
        "context_max": prompt[1],
        "miss_min": miss[0],
        "miss_max": miss[1],
        "running_min": 0,
        "running_max": MAX_RUNNING,
        **row,
        "tpot_margin_seconds_per_token": 0.0,
    }


def check_calibration(document: Document) -> None:
    """The checks that their loader makes, so that no export is refused over there."""
    cells = document["cells"]
    assert 0 < len(document["revision"]) <= 128
    assert 1 <= len(cells) <= MAX_VLLM_ROUTER_CELLS
    for index, cell in enumerate(cells):
        if cell["ttft_seconds"] <= 0 or cell["tpot_p95_seconds"] <= 0:
            raise UsageError(
                f"a cell without TTFT or TPOT cannot be exported to vllm-router: {cell}"
            )
        assert cell["miss_min"] <= cell["miss_max"] <= cell["context_max"]
        assert not any(_overlap(cell, other) for other in cells[:index]), cell


def _overlap(one: Document, other: Document) -> bool:
    return one["path"] == other["path"] and all(
        one[f"{axis}_min"] <= other[f"{axis}_max"] and other[f"{axis}_min"] <= one[f"{axis}_max"]
        for axis in ("context", "miss", "running")
    )


def picks_local(document: Document, cell: Cell) -> bool:
    """What vllm-router would do with the exported cells at a cell's centre."""
    prompt, miss = _prompt(cell), cell.centre["new_tokens"]
    remote = _estimate(document, "cold_remote", prompt, prompt)
    local = _estimate(document, "local_append", prompt, miss)
    if remote is None or local is None:
        return False
    return local + float(document["min_route_gain_seconds"]) < remote


def _estimate(document: Document, path: str, prompt: float, miss: float) -> float | None:
    for cell in document["cells"]:
        if (
            cell["path"] == path
            and cell["context_min"] <= prompt <= cell["context_max"]
            and cell["miss_min"] <= miss <= cell["miss_max"]
        ):
            too_slow = cell["tpot_p95_seconds"] > document["local_tpot_slo_seconds"]
            if path == "local_append" and too_slow:
                return None
            return float(cell["ttft_seconds"] + cell["uncertainty_seconds"])
    return None
