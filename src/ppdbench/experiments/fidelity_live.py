"""A real run against its simulation: signed errors by point and pooled, and the same winners.

Pure: the points and turns of both runs in, one JSON document out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ppdbench.core.errors import NothingUsableError
from ppdbench.core.statistics import QUANTILE_NAMES, row_quantiles
from ppdbench.experiments.fidelity_floor import REAL_DIFFERENCE
from ppdbench.runs.contests import category
from ppdbench.runs.points import PointKey
from ppdbench.runs.records import TurnRecord
from ppdbench.runs.validity import NEVER_VOTES, Validity

Point = Mapping[str, Any]
Records = Callable[[PointKey], Sequence[TurnRecord]]

REMOTE, LOCAL = "remote", "local"
BARRED = NEVER_VOTES | {Validity.ERRORS}
NOT_MEASURED, NOT_PREDICTED = "not_measured", "not_predicted"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a point, where it stands there, and how near a prediction is meant to be."""

    name: str
    turns: str
    latency: str
    quantile: str
    aim: float

    def of(self, figures: Point) -> float | None:
        value: float | None = figures[self.turns][self.latency][self.quantile]
        return value


METRICS = (
    Metric("ttft_later_p50", "turn2plus", "ttft_s", "p50", 0.10),
    Metric("ttft_later_p95", "turn2plus", "ttft_s", "p95", 0.20),
    Metric("ttft_first_p50", "turn1", "ttft_s", "p50", 0.10),
    Metric("ttft_first_p95", "turn1", "ttft_s", "p95", 0.20),
    Metric("tpot_p50", "all", "tpot_s", "p50", 0.10),
    Metric("tpot_p95", "all", "tpot_s", "p95", 0.20),
)
CONTESTED = ("ttft_later_p50", "tpot_p50")


@dataclass(frozen=True, slots=True)
class Pair:
    """A point as measured and as predicted."""

    key: PointKey
    real: Point
    predicted: Point

    def document(self) -> dict[str, Any]:
        """Place, route and figures; ``later_turns`` says how much a quantile of them means."""
        return {
            **{name: getattr(self.key, name) for name in PointKey.__slots__},
            "route": category(self.key.topology, self.key.policy),
            "first_turns": self.real["turn1"]["n"],
            "later_turns": self.real["turn2plus"]["n"],
            "figures": figures_of(self.real, self.predicted),
        }


def report(
    live: Iterable[Point], predicted: Iterable[Point], real_turns: Records, predicted_turns: Records
) -> dict[str, Any]:
    """The whole comparison. The two functions give a point's turns, empty where none were kept.

    Raises:
        NothingUsableError: no point voted on both sides.
    """
    pairs, left_out = matched(live, predicted)
    if not pairs:
        raise NothingUsableError(
            f"no point of the run can be compared ({dict(left_out)}); measure it again"
        )
    points = [pair.document() for pair in pairs]
    return {
        "compared": len(pairs),
        "left_out": dict(left_out),
        "points": points,
        "pooled": pooled(pairs, real_turns, predicted_turns),
        "errors": {metric.name: errors(points, metric) for metric in METRICS},
        "winners": {name: winners(points, name) for name in CONTESTED},
    }


def matched(live: Iterable[Point], predicted: Iterable[Point]) -> tuple[list[Pair], Counter[str]]:
    """Points of both runs by key, and how many are left out, by reason.

    A point with several reasons counts once, under the first by name.
    """
    real, simulated = _by_key(live), _by_key(predicted)
    pairs, left_out = [], Counter[str]()
    for key in {**simulated, **real}:
        reason = _reason(real.get(key), simulated.get(key))
        if reason is None:
            pairs.append(Pair(key, real[key], simulated[key]))
        else:
            left_out[reason] += 1
    return pairs, left_out


def _by_key(points: Iterable[Point]) -> dict[PointKey, Point]:
    return {PointKey(*(point[name] for name in PointKey.__slots__)): point for point in points}


def _reason(real: Point | None, predicted: Point | None) -> str | None:
    if real is None:
        return NOT_MEASURED
    if predicted is None:
        return NOT_PREDICTED
    return min(BARRED.intersection(real["validity"] + predicted["validity"]), default=None)


def figures_of(real: Point, predicted: Point) -> dict[str, dict[str, float] | None]:
    """By metric: seconds on both sides and the signed error; ``None`` where a side has none."""
    return {metric.name: _figure(metric.of(real), metric.of(predicted)) for metric in METRICS}


def _figure(real_s: float | None, predicted_s: float | None) -> dict[str, float] | None:
    if not real_s or predicted_s is None:
        return None
    return {"real_s": real_s, "predicted_s": predicted_s, "error": predicted_s / real_s - 1}


def errors(points: Sequence[Point], metric: Metric) -> dict[str, Any]:
    """Over the points that have the figure: typical error, bias, and how many meet the aim."""
    signed = [figure["error"] for p in points if (figure := p["figures"][metric.name])]
    within = sum(abs(error) <= metric.aim for error in signed)
    return {
        "points": len(signed),
        "median": median(map(abs, signed)) if signed else None,
        "bias": median(signed) if signed else None,
        "aim": metric.aim,
        "within": within,
    }


def winners(points: Sequence[Point], metric: str) -> dict[str, int]:
    """Places with both routes; those whose real difference exceeds 5 %; and how many agree."""
    twins = _twins(points, metric)
    verdicts = [v for remote, local in twins if (v := _same_winner(remote, local)) is not None]
    return {"places": len(twins), "differ": len(verdicts), "same": sum(verdicts)}


def _twins(points: Sequence[Point], metric: str) -> list[tuple[Point, Point]]:
    by_place: dict[tuple[Any, ...], dict[str, Point]] = defaultdict(dict)
    for p in points:
        if p["figures"][metric] is not None:
            place = p["topology"], p["workload"], p["rate_per_s"], p["repeat"]
            by_place[place][p["policy"]] = p["figures"][metric]
    return [(by[REMOTE], by[LOCAL]) for by in by_place.values() if by.keys() >= {REMOTE, LOCAL}]


def _same_winner(remote: Point, local: Point) -> bool | None:
    """``None`` where the routes do not really differ."""
    there: float = local["real_s"] / remote["real_s"] - 1
    if abs(there) <= REAL_DIFFERENCE:
        return None
    here: float = local["predicted_s"] - remote["predicted_s"]
    return here < 0 if there < 0 else here > 0


def pooled(
    pairs: Sequence[Pair], real_turns: Records, predicted_turns: Records
) -> dict[str, dict[str, Any]]:
    """Quantiles of all turns of a configuration, and of all turns there are (``all``).

    A point of a few seconds has few turns, and its p95 is nearly its worst turn; these have more.
    """
    groups: dict[str, list[PointKey]] = defaultdict(list)
    for pair in pairs:
        groups[f"{pair.key.topology} {pair.key.policy}"].append(pair.key)
    groups["all"] = [pair.key for pair in pairs]
    return {
        name: figures_of(_quantiles(keys, real_turns), _quantiles(keys, predicted_turns))
        for name, keys in groups.items()
    }


def _quantiles(keys: Iterable[PointKey], turns_of: Records) -> dict[str, dict[str, Any]]:
    """In the form of a point."""
    records = [record for key in keys for record in turns_of(key)]
    classes = {
        "turn1": [r for r in records if r.turn == 1],
        "turn2plus": [r for r in records if r.turn > 1],
        "all": records,
    }
    return {
        name: {
            "ttft_s": _named_quantiles([r.ttft_s for r in chosen]),
            "tpot_s": _named_quantiles([r.tpot_s for r in chosen]),
        }
        for name, chosen in classes.items()
    }


def _named_quantiles(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return dict.fromkeys(QUANTILE_NAMES)
    row: list[float | None] = row_quantiles(np.array([known]))[0].tolist()
    return dict(zip(QUANTILE_NAMES, row, strict=True))
