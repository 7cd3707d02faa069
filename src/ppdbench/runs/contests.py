"""Who wins where: which configuration is best per cell, by TTFT, by TPOT and by throughput.

A cell is a (workload, rate); a configuration is a (topology, policy). Points that may never vote
and points below 95 % success take no part; repeats count by their mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ppdbench.core.topology import Role, Topology
from ppdbench.runs.validity import MIN_SUCCESS, NEVER_VOTES

Point = Mapping[str, Any]
Configuration = tuple[str, str]
Scores = dict[Configuration, float]
Place = tuple[str, float]

CATEGORIES = ("replica", "remote", "mixed", "local", "hybrid")


def category(topology: str, policy: str) -> str:
    """One of :data:`CATEGORIES`; policies that choose per turn count as ``mixed``."""
    shape = Topology.parse(topology)
    if not shape.prefill_nodes:
        return "replica"
    if shape.count(Role.R):
        return "hybrid"
    if policy in ("remote", "local"):
        return policy
    if policy == "roles" and not (shape.count(Role.PD) and shape.count(Role.D)):
        return "local" if shape.count(Role.PD) else "remote"
    return "mixed"


def turn2_ttft_s(point: Point) -> float | None:
    return _mean(point, "turn2plus", "ttft_s")


def all_turn_tpot_s(point: Point) -> float | None:
    return _mean(point, "all", "tpot_s")


def output_tokens_per_s(point: Point) -> float | None:
    """Of the steady window; with the drain where a source knows only that."""
    steady: float | None = point.get("output_tokens_per_s")
    if steady is not None:
        return steady
    with_drain: float | None = (point.get("with_drain") or {}).get("output_tokens_per_s")
    return with_drain


def _mean(point: Point, group: str, quantity: str) -> float | None:
    value: float | None = ((point.get(group) or {}).get(quantity) or {}).get("mean")
    return value


def scores(
    points: Iterable[Point], measure: Callable[[Point], float | None]
) -> dict[Place, Scores]:
    """Per place, every configuration's figure."""
    found: dict[Place, dict[Configuration, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in filter(_takes_part, points):
        value = measure(point)
        if value is not None:
            place = (point["workload"], float(point["rate_per_s"]))
            found[place][point["topology"], point["policy"]].append(value)
    return {
        place: {configuration: fmean(values) for configuration, values in by.items()}
        for place, by in found.items()
    }


def _takes_part(point: Point) -> bool:
    barred = NEVER_VOTES.intersection(point["validity"])
    return point["success"] >= MIN_SUCCESS and not barred


def winners(by_place: Mapping[Place, Scores], *, highest: bool) -> dict[Place, Configuration]:
    """The best configuration per place; a tie goes to the name that sorts first."""
    sign = -1 if highest else 1
    return {
        place: min(by, key=lambda configuration: (sign * by[configuration], configuration))
        for place, by in by_place.items()
    }


def ttft_tpot_conflict(points: Sequence[Point]) -> dict[str, int]:
    """In how many cells the TTFT-best and the TPOT-best configuration differ.

    Mean TTFT of later turns, mean TPOT of all turns. Cells with fewer than two configurations
    hold no contest and do not count.
    """
    contested = {place: by for place, by in scores(points, turn2_ttft_s).items() if len(by) > 1}
    by_ttft = winners(contested, highest=False)
    by_tpot = winners(scores(points, all_turn_tpot_s), highest=False)
    places = by_ttft.keys() & by_tpot.keys()
    return {
        "cells": len(places),
        "differ": sum(by_ttft[place] != by_tpot[place] for place in places),
    }


def win_rates(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Share of cells that each category wins, by measure; categories without a point are left out.

    The shares of one measure sum to 1 over the cells that hold a contest.
    """
    measures = {
        "ttft": (turn2_ttft_s, False),
        "tpot": (all_turn_tpot_s, False),
        "throughput": (output_tokens_per_s, True),
    }
    present = {category(p["topology"], p["policy"]) for p in points}
    return {
        name: _shares(scores(points, measure), present, highest=highest)
        for name, (measure, highest) in measures.items()
    }


def _shares(
    by_place: Mapping[Place, Scores], present: set[str], *, highest: bool
) -> dict[str, float]:
    contested = {place: by for place, by in by_place.items() if len(by) > 1}
    won = [category(*best) for best in winners(contested, highest=highest).values()]
    return {name: won.count(name) / max(len(won), 1) for name in CATEGORIES if name in present}
