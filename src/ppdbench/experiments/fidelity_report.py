"""Measured against predicted: errors by topology, and whether both see the same winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ppdbench.core.topology import NAMED_TOPOLOGIES
from ppdbench.experiments.fidelity import FITTED_ON, PARAMETERS, Guess, Medians, measured

LATER = "turn2plus"
METRICS = ("ttft_s", "tpot_s")
PAIRS = {
    "core": (("1P_3D", "1P_3pD"), ("2P_2D", "2P_2pD"), ("3P_1D", "3P_1pD")),
    "beside replicas": (
        ("1R_1P_2D", "1R_1P_2pD"),
        ("1R_2P_1D", "1R_2P_1pD"),
        ("2R_1P_1D", "2R_1P_1pD"),
    ),
}
"""Remote and local twins of the authors' sweep."""
REAL_DIFFERENCE = 0.05
MANY_TURNS = 30


@dataclass(frozen=True, slots=True)
class Pair:
    """One point: what was measured and what was predicted."""

    point: Mapping[str, Any]
    predicted: Medians

    @property
    def measured(self) -> Medians:
        return measured(self.point)

    def error(self, metric: str) -> float:
        """Relative, of the median over later turns."""
        key = LATER, metric
        return self.predicted[key] / self.measured[key] - 1


def report(
    pairs: Sequence[Pair], left_out: int, guess: Guess, seeds: int, fit_error: float | None = None
) -> dict[str, Any]:
    """The whole comparison as one JSON document. ``fit_error`` is ``loss_of_fit``'s."""
    by_topology = {
        name: [pair for pair in pairs if pair.point["topology"] == name]
        for name in NAMED_TOPOLOGIES
    }
    new = [pair for pair in pairs if pair.point["topology"] not in FITTED_ON]
    return {
        "fitted_on": list(FITTED_ON),
        "fitted_parameters": len(PARAMETERS),
        "parameters": asdict(guess),
        "fit_error": None if fit_error is None else round(fit_error, 4),
        "seeds": seeds,
        "points": len(pairs),
        "left_out_success_below_95": left_out,
        "topologies": {name: errors(found) for name, found in by_topology.items()},
        "fourteen_not_fitted": errors(new),
        "winners": {
            name: {metric: winners(pairs, twins, metric) for metric in METRICS}
            for name, twins in PAIRS.items()
        },
    }


def errors(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Median and p90 of the absolute error, and the median signed error, by metric."""
    document: dict[str, Any] = {"points": len(pairs)}
    for metric in METRICS:
        signed = np.array([pair.error(metric) for pair in pairs])
        document[metric] = {
            "median": round(float(np.median(np.abs(signed))), 4),
            "p90": round(float(np.percentile(np.abs(signed), 90)), 4),
            "bias": round(float(np.median(signed)), 4),
        }
    return document


def winners(pairs: Sequence[Pair], twins: Sequence[tuple[str, str]], metric: str) -> dict[str, Any]:
    """Comparisons that differ by more than 5 % on the real cluster, and how many agree.

    ``with_30_turns`` counts those whose both points have at least thirty later turns: below that
    a difference of 5 % between two medians is often chance.
    """
    found = {_place(pair): pair for pair in pairs}
    tallies = {"all": [0, 0], "with_30_turns": [0, 0]}
    for remote, local in twins:
        for (topology, workload, rate), pair in found.items():
            other = found.get((local, workload, rate))
            if topology != remote or other is None:
                continue
            verdict = same_winner(pair, other, metric)
            if verdict is None:
                continue
            many = min(pair.point[LATER]["n"], other.point[LATER]["n"]) >= MANY_TURNS
            for name in ("all", "with_30_turns") if many else ("all",):
                tallies[name][0] += verdict
                tallies[name][1] += 1
    return {
        name: {"same": same, "of": of, "share": round(same / of, 4) if of else None}
        for name, (same, of) in tallies.items()
    }


def same_winner(remote: Pair, local: Pair, metric: str) -> bool | None:
    """Whether the simulator prefers the route that was better; ``None`` without a real one."""
    key = LATER, metric
    there = local.measured[key] / remote.measured[key] - 1
    if abs(there) <= REAL_DIFFERENCE:
        return None
    here = local.predicted[key] - remote.predicted[key]
    return (there < 0) == (here < 0)


def as_markdown(document: Mapping[str, Any]) -> str:
    """The table of the report."""
    lines = [
        "| topology | points | Turn-2 TTFT p50, median / p90 error | bias | TPOT p50 | bias |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = dict(document["topologies"]) | {
        "**the fourteen not fitted**": document["fourteen_not_fitted"]
    }
    for name, row in rows.items():
        fitted = " (fitted)" if name in document["fitted_on"] else ""
        cells = [
            f"{m['median']:.1%} / {m['p90']:.1%} | {m['bias']:+.1%}"
            for m in (row["ttft_s"], row["tpot_s"])
        ]
        lines.append(f"| {name}{fitted} | {row['points']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_winner_lines(document)]) + "\n"


def _winner_lines(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "| where they really differ by > 5 % | same winner | both with ≥ 30 later turns |",
        "| --- | --- | --- |",
    ]
    for group, metrics in document["winners"].items():
        for metric, tally in metrics.items():
            cells = [_share(tally["all"]), _share(tally["with_30_turns"])]
            lines.append(f"| {metric[:4].upper()}, {group} pairs | {' | '.join(cells)} |")
    return lines


def _share(tally: Mapping[str, Any]) -> str:
    share = "–" if tally["share"] is None else f"{tally['share']:.1%}"
    return f"{tally['same']} of {tally['of']} ({share})"


def _place(pair: Pair) -> tuple[str, str, float]:
    point = pair.point
    return point["topology"], point["workload"], point["rate_per_s"]
