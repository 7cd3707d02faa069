"""Features to a cell without a search: the nearest-cell map is precomputed in log space.

A request is first clamped into the measured range of every axis; the distance between it and a
cell is then Euclidean over octaves (log2 ratios). Space is cut into boxes, and each box keeps the
cells that can be nearest to a point in it, so an exact answer costs one index and, in the few
boxes that a border crosses, a handful of comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, inf, log2, prod

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Topology
from ppdbench.table.schema import AXES, Table
from ppdbench.table.score import Choice, Status, Verdict

Array = NDArray[np.float64]
Box = tuple[int, ...] | int
"""The one cell of a box, or those that a border inside it divides."""

EXTRAPOLATED = "extrapolated"
"""In the reason of a decision for a request outside the measured range."""

MAX_BOXES = 8_000
MAX_BOXES_PER_AXIS = 24
CHUNK = 400_000
"""Box–cell–axis triples worked on at once: some megabytes."""
TIE = 1e-12
"""Octaves squared within which two distances count as equal; the earlier cell wins."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """``low`` and ``high`` in the axis's unit, ``start`` and ``per_octave`` place its boxes."""

    low: float
    high: float
    start: float
    per_octave: float
    boxes: int

    @classmethod
    def over(cls, values: Sequence[float], boxes: int) -> _Axis:
        low, high = min(values), max(values)
        octaves = log2(high) - log2(low)
        return cls(low, high, log2(low), boxes / octaves if octaves else 0.0, boxes)

    def edges(self) -> Array:
        if not self.per_octave:
            return np.array([self.start, self.start])
        return self.start + np.arange(self.boxes + 1) / self.per_octave


class Lookup:
    """Immutable; one per table and topology. ``decide`` returns decisions made beforehand."""

    __slots__ = ("_axes", "_boxes", "_decisions", "_far", "_limit", "_logs", "cells", "topology")

    def __init__(self, table: Table, topology: str | None = None) -> None:
        self.topology = topology_in(table, topology)
        self.cells = tuple(i for i, c in enumerate(table.cells) if c.topology == self.topology)
        centres = [tuple(table.cells[i].centre[axis] for axis in AXES) for i in self.cells]
        self._logs = [tuple(log2(value) for value in centre) for centre in centres]
        self._axes = _axes(centres)
        self._boxes = _boxes(self._axes, np.array(self._logs))
        self._limit = table.rule.max_distance or inf
        default = Route(table.rule.undecided.value)
        verdicts = [(i, table.verdicts[i]) for i in self.cells]
        self._decisions = tuple(
            tuple(_decision(i, v, default, outside) for outside in ("", EXTRAPOLATED))
            for i, v in verdicts
        )
        self._far = Decision(default, f"table,{EXTRAPOLATED},too_far")

    def __repr__(self) -> str:
        return f"<Lookup {self.topology}: {len(self.cells)} cells, {len(self._boxes)} boxes>"

    def decide(self, features: Features) -> Decision:
        """The kept decision of the nearest cell; ``extrapolated`` outside the measured range.

        Written out per axis: this runs once per request.
        """
        a0, a1, a2, a3 = self._axes
        v0, v1, v2, v3 = (
            features.context_tokens,
            features.new_tokens,
            features.output_tokens,
            features.rate_per_s,
        )
        inside = (
            a0.low <= v0 <= a0.high
            and a1.low <= v1 <= a1.high
            and a2.low <= v2 <= a2.high
            and a3.low <= v3 <= a3.high
        )
        if inside:
            x0, x1, x2, x3 = log2(v0), log2(v1), log2(v2), log2(v3)
            return self._decisions[self._nearest(x0, x1, x2, x3)][0]
        return self._outside((v0, v1, v2, v3))

    def _nearest(self, x0: float, x1: float, x2: float, x3: float) -> int:
        """Position of the nearest cell to a point inside the range, in octaves."""
        a0, a1, a2, a3 = self._axes
        b0 = int((x0 - a0.start) * a0.per_octave)
        b1 = int((x1 - a1.start) * a1.per_octave)
        b2 = int((x2 - a2.start) * a2.per_octave)
        b3 = int((x3 - a3.start) * a3.per_octave)
        row = ((b0 - (b0 == a0.boxes)) * a1.boxes + b1 - (b1 == a1.boxes)) * a2.boxes
        box = self._boxes[(row + b2 - (b2 == a2.boxes)) * a3.boxes + b3 - (b3 == a3.boxes)]
        if isinstance(box, int):
            return box
        best, least = 0, inf
        logs = self._logs
        for cell in box:
            c0, c1, c2, c3 = logs[cell]
            distance = (x0 - c0) ** 2 + (x1 - c1) ** 2 + (x2 - c2) ** 2 + (x3 - c3) ** 2
            if distance < least - TIE:
                best, least = cell, distance
        return best

    def _outside(self, values: tuple[float, float, float, float]) -> Decision:
        a0, a1, a2, a3 = self._axes
        v0, v1, v2, v3 = values
        cell = self._nearest(
            log2(a0.low if v0 < a0.low else min(v0, a0.high)),
            log2(a1.low if v1 < a1.low else min(v1, a1.high)),
            log2(a2.low if v2 < a2.low else min(v2, a2.high)),
            log2(a3.low if v3 < a3.low else min(v3, a3.high)),
        )
        if self._limit < inf and self._distance(values, cell) > self._limit:
            return self._far
        return self._decisions[cell][1]

    def _distance(self, values: Iterable[float], cell: int) -> float:
        """Octaves from the request itself, not from where it was clamped to."""
        pairs = zip(values, self._logs[cell], strict=True)
        return hypot(*(log2(v) - c if v > 0 else inf for v, c in pairs))


def topology_in(table: Table, topology: str | None) -> str:
    """The table's part for a cluster: its own shape, or the one whose twin it is.

    A table of one topology serves every cluster.

    Raises:
        UsageError: a table of several topologies and a cluster that is none of them.
    """
    if len(table.topologies) == 1:
        return table.topologies[0]
    for name in table.topologies:
        if topology in (name, str(Topology.parse(name).twin())):
            return name
    raise UsageError(
        f"the table holds {', '.join(table.topologies)} and the cluster is {topology}: "
        "build a table with one --base"
    )


def _decision(cell: int, verdict: Verdict, default: Route, outside: str) -> Decision:
    undecided = verdict.choice is Choice.UNDECIDED
    route = default if undecided else Route(verdict.choice.value)
    words = ["table"]
    if verdict.status is not Status.MEASURED:
        words.append(verdict.status.value)
    elif undecided:
        words.append("undecided")
    elif verdict.vetoed:
        words.append("guard")
    return Decision(route, ",".join([*words, *filter(None, [outside])]), cell, verdict.s)


def _axes(centres: Sequence[tuple[float, ...]]) -> tuple[_Axis, ...]:
    """Two boxes per gap between values where that fits, fewer on every axis where it does not."""
    columns = list(zip(*centres, strict=True))
    wanted = [min(MAX_BOXES_PER_AXIS, max(1, 2 * (len(set(c)) - 1))) for c in columns]
    shrink = min(1.0, (MAX_BOXES / prod(wanted)) ** (1 / len(wanted)))
    boxes = [max(1, int(count * shrink)) for count in wanted]
    return tuple(_Axis.over(c, b) for c, b in zip(columns, boxes, strict=True))


def _boxes(axes: Sequence[_Axis], logs: Array) -> list[Box]:
    """For every box, row-major, the cells that can be nearest to a point in it."""
    edges = [axis.edges() for axis in axes]
    low, high = (
        np.stack([grid.ravel() for grid in np.meshgrid(*sides, indexing="ij")], axis=1)
        for sides in ([edge[:-1] for edge in edges], [edge[1:] for edge in edges])
    )
    rows = max(1, CHUNK // logs.size)
    boxes: list[Box] = []
    for start in range(0, len(low), rows):
        boxes += _candidates(low[start : start + rows], high[start : start + rows], logs)
    return boxes


def _candidates(low: Array, high: Array, logs: Array) -> list[Box]:
    """Cells that may be nearest somewhere in each box from ``low`` to ``high``.

    The difference of two squared distances is linear, so its extreme lies at a corner: a cell is
    out when the cell nearest to the box's middle beats it even at its best corner. So is a later
    cell that can do no more than tie, as those whose border is an edge of the box.
    """
    low, high = low[:, None, :], high[:, None, :]
    middles = np.sum((logs - (low + high) / 2) ** 2, axis=2)
    first = np.argmin(middles, axis=1)[:, None]
    winner = logs[first]
    slope = -2 * (winner - logs)
    excess = np.sum(winner**2 - logs**2 + np.maximum(slope * low, slope * high), axis=2)
    kept = excess >= np.where(np.arange(len(logs)) > first, TIE, -TIE)
    counts = kept.sum(axis=1)
    cells = np.flatnonzero(kept) % len(logs)
    found = np.split(cells, np.cumsum(counts)[:-1])
    return [int(box[0]) if len(box) == 1 else tuple(map(int, box)) for box in found]
