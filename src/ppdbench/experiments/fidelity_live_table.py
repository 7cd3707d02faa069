"""The comparison with a real run as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ppdbench.experiments.fidelity_live import CONTESTED, METRICS

TITLES = {
    "ttft_later_p50": "TTFT p50, Turn 2+",
    "ttft_later_p95": "TTFT p95, Turn 2+",
    "ttft_first_p50": "TTFT p50, Turn 1",
    "ttft_first_p95": "TTFT p95, Turn 1",
    "tpot_p50": "TPOT p50",
    "tpot_p95": "TPOT p95",
}
CELL = "real → predicted, ms (error)"


def as_markdown(document: Mapping[str, Any]) -> str:
    """Errors over all points, winners, pooled turns, and each point, in this order."""
    parts = (_what(document), _errors(document), _winners(document), _pooled(document))
    return "\n\n".join([*parts, _points(document)]) + "\n"


def _what(document: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{n} {why}" for why, n in sorted(document["left_out"].items()))
    return (
        f"Grid {document['grid']}, seed {document['seed']}: {document['compared']} points "
        f"compared, left out: {reasons or 'none'}."
    )


def _errors(document: Mapping[str, Any]) -> str:
    head = ("metric", "points", "median error", "bias", "aim", "within the aim")
    return _table(head, (_error_row(m.name, document["errors"][m.name]) for m in METRICS))


def _error_row(name: str, found: Mapping[str, Any]) -> list[str]:
    typical = "–" if found["median"] is None else f"{found['median']:.1%}"
    bias = "–" if found["bias"] is None else f"{found['bias']:+.1%}"
    within = f"{found['within']} of {found['points']}"
    return [TITLES[name], str(found["points"]), typical, bias, f"{found['aim']:.0%}", within]


def _winners(document: Mapping[str, Any]) -> str:
    head = ("remote against local", "places", "really differ by > 5 %", "same winner")
    tallies = {name: document["winners"][name] for name in CONTESTED}
    rows = (
        [TITLES[name], str(t["places"]), str(t["differ"]), f"{t['same']} of {t['differ']}"]
        for name, t in tallies.items()
    )
    return _table(head, rows)


def _pooled(document: Mapping[str, Any]) -> str:
    head = (f"turns of all rates and workloads; {CELL}", *(TITLES[m.name] for m in METRICS))
    return _table(head, ([name, *_cells(row)] for name, row in document["pooled"].items()))


def _points(document: Mapping[str, Any]) -> str:
    head = ("point", "rate/s", "workload", "turns", *(TITLES[m.name] for m in METRICS))
    rows = (
        [
            f"{p['topology']} {p['policy']}",
            f"{p['rate_per_s']:g}",
            p["workload"],
            f"{p['first_turns']} + {p['later_turns']}",
            *_cells(p["figures"]),
        ]
        for p in document["points"]
    )
    return _table(head, rows)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    return [_cell(figures[metric.name]) for metric in METRICS]


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return "–"
    real_ms, predicted_ms = figure["real_s"] * 1e3, figure["predicted_s"] * 1e3
    return f"{real_ms:.1f} → {predicted_ms:.1f} ({figure['error']:+.0%})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
