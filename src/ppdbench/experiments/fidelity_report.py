"""Measured against predicted: errors by topology, and whether both see the same winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ppdbench.core.topology import NAMED_TOPOLOGIES
from ppdbench.experiments.fidelity import FITTED_ON, PARAMETERS, Guess, Medians, mean_of, measured
from ppdbench.experiments.fidelity_floor import (
    REAL_DIFFERENCE,
    agreement_under_turn1_noise,
    error_floor,
    self_agreement,
    turn1_differences,
)

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
MANY_TURNS = 30


@dataclass(frozen=True)
class Pair:
    """One point: what was measured, and what was simulated with each seed."""

    point: Mapping[str, Any]
    runs: Sequence[Medians]

    @cached_property
    def predicted(self) -> Medians:
        return mean_of(self.runs)

    @cached_property
    def measured(self) -> Medians:
        return measured(self.point)

    def without(self, seed: int) -> Medians:
        """What the other runs than number ``seed`` predict."""
        return mean_of([run for i, run in enumerate(self.runs) if i != seed])

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
        "topologies": {name: errors(found) for name, found in by_topology.items() if found},
        "fourteen_not_fitted": errors(new) if new else None,
        "winners": {
            name: {metric: winners(twins_of(pairs, names), metric) for metric in METRICS}
            for name, names in PAIRS.items()
        },
        "turn1_of_twins": {
            name: {metric: turn1_differences(twins_of(pairs, names), metric) for metric in METRICS}
            for name, names in PAIRS.items()
        },
    }


def errors(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Median and p90 of the absolute error, the median signed error, and the floor, by metric."""
    document: dict[str, Any] = {"points": len(pairs)}
    for metric in METRICS:
        signed = np.array([pair.error(metric) for pair in pairs])
        document[metric] = {
            "median": round(float(np.median(np.abs(signed))), 4),
            "p90": round(float(np.percentile(np.abs(signed), 90)), 4),
            "bias": round(float(np.median(signed)), 4),
            "floor": error_floor(pairs, (LATER, metric)),
        }
    return document


def twins_of(pairs: Sequence[Pair], names: Sequence[tuple[str, str]]) -> list[tuple[Pair, Pair]]:
    """The remote and the local point of each workload and rate that has both."""
    found = {_place(pair): pair for pair in pairs}
    return [
        (pair, found[local, workload, rate])
        for remote, local in names
        for (topology, workload, rate), pair in found.items()
        if topology == remote and (local, workload, rate) in found
    ]


def winners(twins: Sequence[tuple[Pair, Pair]], metric: str) -> dict[str, Any]:
    """Comparisons that differ by more than 5 % on the real cluster, and how many agree.

    ``with_30_turns`` counts those whose both points have at least thirty later turns: below that
    a difference of 5 % between two medians is often chance. The two ceilings say how many would
    agree if the simulator were the cluster.
    """
    tallies = {"all": [0, 0], "with_30_turns": [0, 0]}
    for remote, local in twins:
        verdict = same_winner(remote, local, metric)
        if verdict is None:
            continue
        many = min(remote.point[LATER]["n"], local.point[LATER]["n"]) >= MANY_TURNS
        for name in ("all", "with_30_turns") if many else ("all",):
            tallies[name][0] += verdict
            tallies[name][1] += 1
    found = {
        name: {"same": same, "of": of, "share": round(same / of, 4) if of else None}
        for name, (same, of) in tallies.items()
    }
    key = LATER, metric
    ceilings = {
        "ceiling_of_seeds": self_agreement(twins, key),
        "ceiling_of_turn1_noise": agreement_under_turn1_noise(twins, key),
    }
    return found | ceilings


def same_winner(remote: Pair, local: Pair, metric: str) -> bool | None:
    """Whether the simulator prefers the route that was better; ``None`` without a real one."""
    key = LATER, metric
    there = local.measured[key] / remote.measured[key] - 1
    if abs(there) <= REAL_DIFFERENCE:
        return None
    here = local.predicted[key] - remote.predicted[key]
    return (there < 0) == (here < 0)


def as_markdown(document: Mapping[str, Any]) -> str:
    """The tables of the report."""
    errors_of = ("Turn-2 TTFT p50, median / p90 error", "TPOT p50")
    lines = _head("topology", "points", *(t for e in errors_of for t in (e, "floor", "bias")))
    rows = dict(document["topologies"])
    if document["fourteen_not_fitted"]:
        rows["**the fourteen not fitted**"] = document["fourteen_not_fitted"]
    for name, row in rows.items():
        fitted = " (fitted)" if name in document["fitted_on"] else ""
        cells = [
            f"{_errors(m)} | {_errors(m['floor'])} | {m['bias']:+.1%}"
            for m in (row["ttft_s"], row["tpot_s"])
        ]
        lines.append(f"| {name}{fitted} | {row['points']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_winner_lines(document), "", *_turn1_lines(document)]) + "\n"


def _head(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]


def _errors(row: Mapping[str, float] | None) -> str:
    return "–" if row is None else f"{row['median']:.1%} / {row['p90']:.1%}"


def _winner_lines(document: Mapping[str, Any]) -> list[str]:
    lines = _head(
        "where they really differ by > 5 %", "same winner", "both with ≥ 30 later turns",
        "between two seeds", "under Turn-1 noise",
    )  # fmt: skip
    for group, metrics in document["winners"].items():
        for metric, tally in metrics.items():
            noise = tally["ceiling_of_turn1_noise"]
            cells = [
                *(_share(tally[name]) for name in ("all", "with_30_turns", "ceiling_of_seeds")),
                "–" if noise is None else f"{noise:.1%}",
            ]
            lines.append(f"| {metric[:4].upper()}, {group} pairs | {' | '.join(cells)} |")
    return lines


def _turn1_lines(document: Mapping[str, Any]) -> list[str]:
    lines = _head(
        "Turn 1 of twins differs by > 5 %", "really", "as expected", "really, beyond that",
        "between two seeds, beyond that",
    )  # fmt: skip
    counts = ("real", "expected", "unexplained", "unexplained_between_seeds")
    for group, metrics in document["turn1_of_twins"].items():
        for metric, tally in metrics.items():
            cells = [
                "–" if tally[name] is None else f"{tally[name]} of {tally['pairs']}"
                for name in counts
            ]
            lines.append(f"| {metric[:4].upper()}, {group} pairs | {' | '.join(cells)} |")
    return lines


def _share(tally: Mapping[str, Any]) -> str:
    share = "–" if tally["share"] is None else f"{tally['share']:.1%}"
    return f"{tally['same']} of {tally['of']} ({share})"


def _place(pair: Pair) -> tuple[str, str, float]:
    point = pair.point
    return point["topology"], point["workload"], point["rate_per_s"]
