"""The numbers behind the figures, as plain data for ``summary.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ppdbench.plots.series import (
    Point,
    SeriesKey,
    curve,
    route_class,
    select,
    series_of,
    usable,
    workloads_of,
)
from ppdbench.runs.contests import ttft_tpot_conflict, win_rates


def run_summary(points: Sequence[Point], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, and Turn 2+ latency of each series per workload and rate."""
    codes = Counter(str(code) for point in points for code in point.get("validity") or ())
    return {
        "kind": "run",
        "backend": manifest.get("backend"),
        "simulated": manifest.get("backend") == "sim",
        "points": len(points),
        "ok": sum(not (point.get("validity") or ()) for point in points),
        "usable": sum(usable(point) for point in points),
        "by_validity": dict(sorted(codes.items())),
        "ttft_tpot_conflict": ttft_tpot_conflict(points),
        "win_rates": win_rates(points),
        "series": [_series_summary(points, key) for key in series_of(points)],
    }


def _series_summary(points: Sequence[Point], key: SeriesKey) -> dict[str, Any]:
    cells = [
        {
            "workload": workload,
            "rate_per_s": rate,
            "ttft_p50_s": ttft.mean,
            "tpot_mean_s": None if rate not in tpots else tpots[rate].mean,
        }
        for workload in workloads_of(points)
        for chosen in [select(points, key, workload)]
        for tpots in [curve(chosen, "tpot_s", "mean")]
        for rate, ttft in curve(chosen, "ttft_s", "p50").items()
    ]
    return {
        "topology": key.topology,
        "policy": key.policy,
        "class": route_class(key),
        "turn2plus": cells,
    }


def table_summary(document: Mapping[str, Any]) -> dict[str, Any]:
    """Cells by decision and by status."""
    cells = document["cells"]
    source = document.get("provenance") or {}
    return {
        "kind": "table",
        "backend": source.get("backend"),
        "simulated": "sim" in str(source.get("backend")).split("+"),
        "cells": len(cells),
        "by_decision": dict(sorted(Counter(str(cell["decision"]) for cell in cells).items())),
        "by_status": dict(sorted(Counter(str(cell["status"]) for cell in cells).items())),
        "digest": document.get("digest"),
    }


def microbench_summary(document: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured and the finding in words; the rows stay in the folder."""
    return {
        "kind": "microbench",
        "protocol": document["protocol"],
        "backend": document["backend"],
        "simulated": document["simulated"],
        "rows": len(document["rows"]),
        "finding": document["finding"],
    }
