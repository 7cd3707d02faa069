"""What a simpler policy loses against the full table, in units of S.

Remote is worth 0 and local is worth S in every cell; the table's own worth is that of its choice.
Regret is the table's worth minus the policy's, so it may be negative where the table took the
default of an undecided cell, or where sticky replicas beat both routes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.decision import Features, Route
from ppdbench.core.errors import UsageError
from ppdbench.table.lookup import Lookup
from ppdbench.table.schema import AXES, Cell, Table
from ppdbench.table.score import Choice, Rule, Side, Status, Verdict, deltas, score

IsLocal = Callable[[Cell], bool]

DYNAMO_DEFAULT = (2048.0, 0.7)
"""``eff_isl_threshold`` and ``eff_isl_ratio_threshold`` as Dynamo ships them."""
FIELD_THRESHOLD = 512
"""New tokens below which the paper's router and others append locally without asking."""


@dataclass(frozen=True, slots=True)
class Regret:
    """One policy against the table, over its measured cells.

    ``infeasible`` counts one-sided cells where it picks the route that failed. S is not defined
    there; ``mean_with_failures`` counts each as the loss of the whole TTFT weight, which is what S
    tends to when remote's TTFT grows without end. ``agree`` is the share of cells with the same
    route, ``None`` for replicas.
    """

    policy: str
    setting: dict[str, Any]
    cells: int
    mean_s_lost: float
    worst_s_lost: float
    agree: float | None
    infeasible: int
    mean_with_failures: float


@dataclass(frozen=True, slots=True)
class _Scored:
    cell: Cell
    verdict: Verdict
    local: bool
    """The table's route, defaults applied."""

    @property
    def worth(self) -> float:
        return (self.verdict.s or 0.0) if self.local else 0.0


def regrets(table: Table) -> list[Regret]:
    """Every policy of the report, in a fixed order; replicas only where a run measured them.

    In-sample: the table and the best limits were chosen by the same figures that score them here,
    which flatters the table most, because it has the most freedom. See :func:`held_out`.
    """
    return _report(table, best_threshold(table), best_two(table), None)


def held_out(table: Table, fresh: Table) -> list[Regret]:
    """The choices of ``table`` and its best limits, scored by the figures of other runs.

    ``table_refit`` is what ``fresh`` would have chosen for itself: as much as it is below 0, an
    in-sample score flatters.

    Raises:
        UsageError: tables of another rule or topology, or with a run in common.
    """
    _check_apart(table, fresh)
    decide = Lookup(table).decide

    def table_picks(cell: Cell) -> bool:
        place = cell.centre
        features = Features(2, *(place[axis] for axis in AXES))  # type: ignore[arg-type]
        return decide(features).route is Route.LOCAL

    pick_of = {one.cell.key: one.local for one in _measured(fresh, None)}
    report = _report(fresh, best_threshold(table), best_two(table), table_picks)
    refit = of_policy(
        fresh, "table_refit", lambda c: pick_of.get(c.key, table_picks(c)), table_picks
    )
    return [refit, *report]


def _check_apart(table: Table, fresh: Table) -> None:
    runs = [{run["digest"] for run in t.provenance.get("runs", ())} for t in (table, fresh)]
    if runs[0] & runs[1]:
        raise UsageError("both tables hold the same run; measure again with another --seed")
    rules = [(t.rule.w_ttft, t.rule.w_tpot, t.rule.stat, t.rule.slo) for t in (table, fresh)]
    if rules[0] != rules[1] or table.topologies != fresh.topologies:
        raise UsageError(
            "the two tables differ in base, weights, statistic or limits, so that S is not the "
            "same in both; build the second as the first"
        )


def _report(
    table: Table, one_limit: Regret, two_limits: Regret, table_picks: IsLocal | None
) -> list[Regret]:
    limit, pair = one_limit.setting, tuple(two_limits.setting.values())
    dynamo, field = DYNAMO_DEFAULT, FIELD_THRESHOLD
    policies: list[tuple[str, IsLocal, dict[str, float]]] = [
        ("always_local", lambda _: True, {}),
        ("always_remote", lambda _: False, {}),
        (one_limit.policy, threshold(*limit.values()), limit),
        (f"threshold_{field}", threshold(field), {"max_new_tokens": field}),
        (two_limits.policy, two(*pair), two_limits.setting),
        ("dynamo_default", two(*dynamo), _named(dynamo)),
    ]
    found = [of_policy(table, name, pick, table_picks, **s) for name, pick, s in policies]
    replicas = of_replicas(table, table_picks)
    return [*found, replicas] if replicas else found


def threshold(max_new_tokens: float) -> IsLocal:
    """Local up to and including ``max_new_tokens``."""
    return lambda cell: cell.centre["new_tokens"] <= max_new_tokens


def two(eff_isl: float, ratio: float) -> IsLocal:
    """Dynamo's ``isl_bounding``: both below their limits; new tokens are its effective ISL."""

    def is_local(cell: Cell) -> bool:
        return cell.centre["new_tokens"] < eff_isl and _ratio(cell) < ratio

    return is_local


def best_threshold(table: Table) -> Regret:
    """The best single limit on new tokens; 0 is always remote. Ties take the largest."""
    limits = [0.0, *sorted({cell.centre["new_tokens"] for cell in table.cells})]
    tried = [
        of_policy(table, "best_threshold", threshold(limit), max_new_tokens=limit)
        for limit in limits
    ]
    return min(reversed(tried), key=lambda regret: regret.mean_with_failures)


def best_two(table: Table) -> Regret:
    """The best pair for Dynamo, over limits that lie between measured values.

    Ties take the largest limit on new tokens, then the largest on the ratio.
    """
    new = between({cell.centre["new_tokens"] for cell in table.cells})
    ratios = [*between({_ratio(cell) for cell in table.cells})[:-1], 1.0]
    losses = _losses_of_pairs(table, new, ratios)
    last = losses.size - 1 - int(np.argmin(losses[::-1, ::-1]))
    row, column = divmod(last, len(ratios))
    pair = new[row], ratios[column]
    return of_policy(table, "best_dynamo", two(*pair), None, **_named(pair))


def _losses_of_pairs(
    table: Table, new: Sequence[float], ratios: Sequence[float]
) -> NDArray[np.float64]:
    """``mean_with_failures`` by limit on new tokens and by limit on the ratio.

    What a pair gains is a sum over the cells below both limits, so sums along both axes give it
    for all pairs at once, where asking :func:`of_policy` of each would look at every cell again.
    """
    gain, wrong = np.zeros((2, len(new) + 1, len(ratios) + 1))
    worth, measured, failed_if_remote = 0.0, 0, 0
    for one in _measured(table, None):
        worth, measured = worth + one.worth, measured + 1
        gain[_place(one.cell, new, ratios)] += one.verdict.s or 0.0
    for cell, verdict in zip(table.cells, table.verdicts, strict=True):
        if verdict.status is Status.ONE_SIDED:
            must_be_local = verdict.choice is Choice.LOCAL
            failed_if_remote += must_be_local
            wrong[_place(cell, new, ratios)] += -1 if must_be_local else 1
    gains, wrongs = (part.cumsum(0).cumsum(1)[:-1, :-1] for part in (gain, wrong))
    failures = wrongs + failed_if_remote
    lost = worth - gains + failures * _loss_of_failure(table)
    return np.asarray(lost / np.maximum(measured + failures, 1))


def _place(cell: Cell, new: Sequence[float], ratios: Sequence[float]) -> tuple[int, int]:
    """The first limit on each axis that a cell is below."""
    return bisect_right(new, cell.centre["new_tokens"]), bisect_right(ratios, _ratio(cell))


def _ratio(cell: Cell) -> float:
    new, context = cell.centre["new_tokens"], cell.centre["context_tokens"]
    return new / (context + new)


def between(values: Iterable[float]) -> list[float]:
    """Limits that split ``values`` in every way: below all, between two, above all."""
    known = sorted(values)
    inner = [(a * b) ** 0.5 for a, b in pairwise(known)]
    return [known[0] / 2, *inner, known[-1] * 2]


def _named(pair: tuple[float, float]) -> dict[str, float]:
    return {"eff_isl_threshold": pair[0], "eff_isl_ratio_threshold": pair[1]}


def of_policy(
    table: Table,
    name: str,
    is_local: IsLocal,
    table_picks: IsLocal | None = None,
    **setting: float,
) -> Regret:
    """Over measured cells; one-sided ones only count wrong picks.

    ``table_picks`` are the choices to lose against, the table's own when left out.
    """
    scored = list(_measured(table, table_picks))
    lost = [one.worth - ((one.verdict.s or 0.0) if is_local(one.cell) else 0.0) for one in scored]
    agree = [is_local(one.cell) == one.local for one in scored]
    wrong = sum(
        is_local(cell) != (verdict.choice is Choice.LOCAL)
        for cell, verdict in zip(table.cells, table.verdicts, strict=True)
        if verdict.status is Status.ONE_SIDED
    )
    return _regret(name, dict(setting), lost, _failed(table, wrong), sum(agree))


def of_replicas(table: Table, table_picks: IsLocal | None = None) -> Regret | None:
    """Sticky replicas of as many nodes, scored against remote as local is."""
    lost: list[float] = []
    failed = 0
    for one in _measured(table, table_picks):
        s = replica_score(one.cell, table.rule)
        if s is not None:
            lost.append(one.worth - s)
        elif one.cell.replica is not None:
            failed += 1
    if not lost:
        return None
    name = next(c.replica_topology for c in table.cells if c.replica_topology)
    return _regret(f"sticky_{name}", {}, lost, _failed(table, failed), None)


def replica_score(cell: Cell, rule: Rule) -> float | None:
    """S of replicas with remote as the other route; ``None`` where they failed or are unknown."""
    replica, remote = cell.replica, cell.remote
    if replica is None or remote is None or not replica.feasible(rule):
        return None
    if rule.slo is not None:
        return _difference(replica, remote)
    return score(*deltas(remote, replica, rule.stat), rule)


def _difference(one: Side, other: Side) -> float | None:
    if one.meets_slo is None or other.meets_slo is None:
        return None
    return one.meets_slo - other.meets_slo


def _measured(table: Table, table_picks: IsLocal | None) -> Iterable[_Scored]:
    for cell, verdict in zip(table.cells, table.verdicts, strict=True):
        if verdict.status is Status.MEASURED:
            choice = table.rule.undecided if verdict.choice is Choice.UNDECIDED else verdict.choice
            local = table_picks(cell) if table_picks else choice is Choice.LOCAL
            yield _Scored(cell, verdict, local)


def _regret(
    name: str,
    setting: dict[str, Any],
    lost: Sequence[float],
    failed: Sequence[float],
    agree: int | None,
) -> Regret:
    """``failed`` are the losses of picks of a failed route."""
    cells = len(lost)
    return Regret(
        policy=name,
        setting=setting,
        cells=cells,
        mean_s_lost=sum(lost) / cells if cells else 0.0,
        worst_s_lost=max(lost, default=0.0),
        agree=agree / cells if cells and agree is not None else None,
        infeasible=len(failed),
        mean_with_failures=(sum(lost) + sum(failed)) / max(cells + len(failed), 1),
    )


def _failed(table: Table, count: int) -> list[float]:
    return [_loss_of_failure(table)] * count


def _loss_of_failure(table: Table) -> float:
    return 1.0 if table.rule.slo else table.rule.w_ttft
