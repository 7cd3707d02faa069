"""Whether turns still behave as the table's cells say. Pure arithmetic over outcomes."""

from __future__ import annotations

from math import log2
from typing import Protocol

from ppdbench.core.decision import Decision, Route
from ppdbench.table.lookup import EXTRAPOLATED
from ppdbench.table.schema import Table

MIN_TURNS = 50
MEMORY_TURNS = 200
LIMIT_OCTAVES = 1.0
"""A mean factor of two off the cells, either way, is drift."""

HOLD_S = 300.0


class HasTable(Protocol):
    """A policy that decides by a table."""

    @property
    def table(self) -> Table: ...


class Drift:
    """Mean log-ratio of measured to expected TTFT per route, over about the last 200 turns.

    Beyond :data:`LIMIT_OCTAVES` the table is not believed for :data:`HOLD_S`; then the mean starts
    anew. Turn 1 and cold turns are no table's matter, nor are turns outside its measured range.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._fallback = Decision(Route(table.rule.undecided.value), "drift")
        self._octaves = {Route.LOCAL: 0.0, Route.REMOTE: 0.0}
        self._turns = {Route.LOCAL: 0, Route.REMOTE: 0}
        self._until_s = 0.0

    def __repr__(self) -> str:
        means = {route.value: round(octaves, 2) for route, octaves in self._octaves.items()}
        return f"<Drift {means} octaves>"

    def corrected(self, decision: Decision, now_s: float) -> Decision:
        """``decision``, or the table's default while the table is not believed."""
        return self._fallback if now_s < self._until_s and decision.cell is not None else decision

    def alarm(self, now_s: float) -> bool:
        return now_s < self._until_s

    def feed(self, decision: Decision, ttft_s: float, now_s: float) -> None:
        """Compare one answered later turn with its cell."""
        expected_s = self._expected_s(decision)
        if expected_s is None or ttft_s <= 0 or self.alarm(now_s):
            return
        route = decision.route
        self._turns[route] += 1
        weight = 1 / min(self._turns[route], MEMORY_TURNS)
        self._octaves[route] += weight * (log2(ttft_s / expected_s) - self._octaves[route])
        if self._turns[route] >= MIN_TURNS and abs(self._octaves[route]) > LIMIT_OCTAVES:
            self._until_s = now_s + HOLD_S
            self._turns = dict.fromkeys(self._turns, 0)
            self._octaves = dict.fromkeys(self._octaves, 0.0)

    def _expected_s(self, decision: Decision) -> float | None:
        if decision.cell is None or decision.route not in self._turns:
            return None
        if EXTRAPOLATED in decision.reason:
            return None
        cell = self._table.cells[decision.cell]
        side = cell.local if decision.route is Route.LOCAL else cell.remote
        if side is None:
            return None
        # The mean of logarithms is a median's; a tail's, as under --stat p99, is far off it always.
        value = side.ttft_s.get("p50") or side.ttft_s.get(self._table.rule.stat)
        return value if value and value > 0 else None
