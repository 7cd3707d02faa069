"""The next measurement as a grid file: the most valuable places that fit a budget."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdbench.core.decision import Features
from ppdbench.core.errors import UsageError
from ppdbench.experiments.grid import Grid, find_grid
from ppdbench.runs.points import PointKey
from ppdbench.table.lookup import Lookup
from ppdbench.table.plan import Worth

DRAIN_SHARE = 1.0
"""A point is taken to last its arrivals and as long again to drain."""
SIDES = ("remote", "local")
LEAST_REPEATS = 3
NEGLIGIBLE_SHARE = 1e-3
"""Places worth less than this share of the best one are not measured, whatever the budget."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which cells a grid's later turns look up.

    ``turns`` holds how many, by cell. Of all ``later_turns``, ``outside`` lie beyond the measured
    range; ``too_far`` of those are beyond the table's stated distance and look up no cell.
    """

    grid: str
    turns: Mapping[int, float]
    later_turns: int
    outside: int
    too_far: int


def traffic_of(grid: Grid, lookup: Lookup) -> Traffic:
    """What a grid's conversations look up, at the grid's own places and rates.

    Raises:
        UsageError: it has no later turn, or none that looks up a cell.
    """
    topology = grid.arms[0].topologies[0]
    places = dict.fromkeys((key.workload, key.rate_per_s) for key in grid.points())
    decisions = [
        lookup.decide(features)
        for place in places
        for features in _later_turns(grid, PointKey(topology, SIDES[0], *place))
    ]
    turns = Counter(decision.cell for decision in decisions if decision.cell is not None)
    if not turns:
        raise UsageError(_no_traffic(grid, len(decisions)))
    return Traffic(
        grid.name,
        {cell: float(count) for cell, count in turns.items()},
        len(decisions),
        outside=sum("extrapolated" in decision.reason for decision in decisions),
        too_far=sum(decision.cell is None for decision in decisions),
    )


def _no_traffic(grid: Grid, later_turns: int) -> str:
    if not later_turns:
        return (
            f"--traffic {grid.name} has no later turn, and only those look a table up; "
            "give a grid of longer conversations or a longer duration"
        )
    return (
        f"--traffic {grid.name}: all of its {later_turns} later turns are farther from every cell "
        "than the table's max_distance; give a grid nearer to what was measured"
    )


def _later_turns(grid: Grid, key: PointKey) -> list[Features]:
    return [
        Features(
            number,
            arrival.conversation.context_before(number),
            turn.new_tokens,
            turn.output_tokens,
            key.rate_per_s,
        )
        for arrival in grid.schedule(key, 0)
        for number, turn in enumerate(arrival.conversation.turns, 1)
        if number > 1
    ]


def affordable(places: Sequence[Worth], grid: Grid, budget_s: float) -> list[Worth]:
    """The first places that fit, each measured on both sides with the grid's repeats.

    Raises:
        UsageError: a grid without a duration, nothing of value, or a budget below one place.
    """
    per_place_s = place_s(grid)
    if not math.isfinite(per_place_s):
        raise UsageError(
            f"grid {grid.name} follows a trace and has no duration; give another with --grid"
        )
    best = max((place.value for place in places), default=0.0)
    if not best:
        raise UsageError(
            "nothing is worth measuring: every decision is certain, failed, or met by none of the "
            "traffic; leave --traffic out or give another"
        )
    known = [
        p for p in places if p.workload in grid.workloads and p.value > NEGLIGIBLE_SHARE * best
    ]
    count = int(budget_s // per_place_s)
    if not known:
        raise UsageError(
            f"no cell of the table is a workload of grid {grid.name} and worth measuring; "
            "give the grid it was measured with as --grid"
        )
    if not count:
        raise UsageError(
            f"--budget is {budget_s:g} s and one place takes {per_place_s:g} s "
            f"({repeats(grid)} repeats, both routes); allow more"
        )
    return known[:count]


def place_s(grid: Grid) -> float:
    return len(SIDES) * repeats(grid) * grid.duration_s * (1 + DRAIN_SHARE)


def repeats(grid: Grid) -> int:
    """Enough for an interval."""
    return max(LEAST_REPEATS, grid.repeats)


def grid_text(name_or_path: str, base: str, chosen: Sequence[Worth], count: int) -> str:
    """A grid file over the chosen places alone; workloads, pauses and arrivals stay as they were.

    Equal workload digests let its run be pooled with the runs the table came from.
    """
    path = find_grid(name_or_path)
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    names = {place.workload for place in chosen}
    entries = [_absolute(entry, path) for entry in document["workload"] if entry["name"] in names]
    rates = sorted({place.rate_per_s for place in chosen})
    loads = {"users": list(map(int, rates))} if "users" in document else {"rates_per_s": rates}
    document |= {
        **loads,
        "title": f"What to measure next, from {path.stem}",
        "places": [[place.workload, place.rate_per_s] for place in chosen],
        "repeats": count,
        "keep_records": True,
        "arm": [{"topologies": [base], "policies": list(SIDES)}],
        "workload": entries,
    }
    head = (
        "# Written by ppd table plan. Sweep it with a --seed that no earlier run had, so that its\n"
        "# conversations are new; then give both runs to ppd build-table.\n"
    )
    return head + toml(document)


def _absolute(entry: Mapping[str, Any], grid: Path) -> Mapping[str, Any]:
    """A data file beside the first grid is not beside the new one."""
    source = entry.get("source")
    beside = grid.parent / source if source else None
    return {**entry, "source": str(beside.resolve())} if beside and beside.exists() else entry


def toml(document: Mapping[str, Any]) -> str:
    """Values first, then tables, then arrays of tables; deeper tables stand inline."""
    values = [f"{key} = {_value(v)}" for key, v in document.items() if not _is_table(v)]
    blocks = [
        "\n".join([f"\n{head}", *(f"{k} = {_value(v)}" for k, v in table.items())])
        for key, value in document.items()
        if _is_table(value)
        for head, table in _tables(key, value)
    ]
    return "\n".join([*values, *blocks]) + "\n"


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    )


def _tables(key: str, value: Any) -> list[tuple[str, Mapping[str, Any]]]:  # noqa: ANN401
    if isinstance(value, dict):
        return [(f"[{key}]", value)]
    return [(f"[[{key}]]", table) for table in value]


def _value(value: object) -> str:
    """JSON's strings, numbers, booleans and arrays are TOML's."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
