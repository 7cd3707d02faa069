"""Turns of both sides side by side, and the length bins that cells stand for.

Compared runs replay the same conversations, so a turn is known on both sides by (run, repeat,
conversation, turn). A turn that failed or was never sent on one side has no figures there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.decision import Route
from ppdbench.runs.records import TurnRecord
from ppdbench.table.inputs import SidePoint, key_of
from ppdbench.table.schema import plain

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
TurnKey = tuple[str, int, str, int]
"""Run digest, repeat, conversation, turn."""

LENGTHS = ("context_tokens", "new_tokens", "output_tokens")
MAX_EXACT_SHAPES = 16
"""Up to so many different turn shapes, each is a cell of its own; above, quantile bins are."""
TURNS_PER_BIN = 30
MAX_BINS_PER_AXIS = 4


@dataclass(frozen=True, slots=True)
class Turns:
    """Later turns as rows. Figures are NaN where a side has none; columns are remote, local.

    ``group`` numbers the (run, repeat) and ``unit`` the conversation within it: what a resampling
    may draw as a whole.
    """

    group: NDArray[np.intp]
    unit: NDArray[np.intp]
    lengths: Floats
    ttft_s: Floats
    tpot_s: Floats

    def __len__(self) -> int:
        return len(self.group)

    def take(self, mask: Mask) -> Turns:
        return Turns(
            self.group[mask],
            self.unit[mask],
            self.lengths[mask],
            self.ttft_s[mask],
            self.tpot_s[mask],
        )

    @property
    def ok(self) -> Mask:
        """Rows by sides: the turn got a token there."""
        return np.asarray(~np.isnan(self.ttft_s))


@dataclass(frozen=True, slots=True)
class Bin:
    """A part of the length space, half open (``low`` < length ≤ ``high``), and its middle."""

    low: Floats
    high: Floats
    centre: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]] | None

    def holds(self, lengths: Floats) -> Mask:
        return np.asarray(((lengths > self.low) & (lengths <= self.high)).all(axis=1))


def paired_turns(*sides: Sequence[SidePoint], replicas: bool = False) -> Turns | None:
    """Rows over every later turn that any side sent; ``None`` when a point kept no records.

    Only repeats that stand on every side take part. Without ``replicas``, turns that an R served
    are left out: in a hybrid, an R serves its turns under every policy.
    """
    shared = set.intersection(*({_repeat(p) for p in side} for side in sides))
    chosen = [[p for p in side if _repeat(p) in shared] for side in sides]
    tables = [_by_key(side, replicas=replicas) for side in chosen]
    if not shared or any(table is None for table in tables):
        return None
    return _joined([table for table in tables if table is not None])


def _repeat(side: SidePoint) -> tuple[str, int]:
    return side.run.digest, int(side.point["repeat"])


def _by_key(points: Sequence[SidePoint], *, replicas: bool) -> dict[TurnKey, TurnRecord] | None:
    found: dict[TurnKey, TurnRecord] = {}
    for side in points:
        records = side.run.records(key_of(side.point))
        if not records:
            return None
        for record in records:
            if record.turn > 1 and (replicas or record.route is not Route.REPLICA):
                found[*_repeat(side), record.conversation, record.turn] = record
    return found


def _joined(sides: Sequence[Mapping[TurnKey, TurnRecord]]) -> Turns:
    keys = sorted(set().union(*sides))
    rows = [[side.get(key) for side in sides] for key in keys]
    planned = [next(r for r in row if r is not None) for row in rows]
    return Turns(
        group=_numbered([key[:2] for key in keys]),
        unit=_numbered([key[:3] for key in keys]),
        lengths=_matrix(
            [r.context_tokens, r.new_tokens, r.wanted_output_tokens] for r in planned
        ).reshape(-1, len(LENGTHS)),
        ttft_s=_matrix([r and r.ttft_s for r in row] for row in rows).reshape(-1, len(sides)),
        tpot_s=_matrix([r and r.tpot_s for r in row] for row in rows).reshape(-1, len(sides)),
    )


def _numbered(names: Sequence[Any]) -> NDArray[np.intp]:
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return np.array([places[name] for name in names], dtype=np.intp)


def _matrix(rows: Iterator[list[Any]] | Any) -> Floats:  # noqa: ANN401
    return np.array(list(rows), dtype=np.float64)


def length_bins(places: Sequence[Turns]) -> list[Bin]:
    """Bins of one workload, the same at every rate, so that cells form rows over the rates.

    Few different shapes (a synthetic workload) are cells as they are. Many (real conversations)
    become quantile bins: by context, and within each by new tokens, as many as leave about
    :data:`TURNS_PER_BIN` turns in each at the thinnest rate.
    """
    lengths = np.concatenate([turns.lengths for turns in places])
    shapes = np.unique(lengths, axis=0)
    if len(shapes) <= MAX_EXACT_SHAPES:
        return [_exact(shape) for shape in shapes]
    thinnest = min(len(turns) for turns in places)
    count = min(MAX_BINS_PER_AXIS, max(1, isqrt(thinnest // TURNS_PER_BIN)))
    return [
        _bin(lengths, (context, new))
        for context in _quantile_ranges(lengths[:, 0], count)
        for new in _quantile_ranges(lengths[_within(lengths[:, 0], context), 1], count)
    ]


def _exact(shape: Floats) -> Bin:
    centre = {name: plain(float(v)) for name, v in zip(LENGTHS, shape, strict=True)}
    return Bin(shape - 0.5, shape, centre, None)


Range = tuple[float, float]


def _quantile_ranges(values: Floats, count: int) -> list[Range]:
    """Half-open ranges with about equal numbers of ``values``; equal edges collapse."""
    inner = np.unique(np.quantile(values, np.arange(1, count) / count, method="inverted_cdf"))
    inner = inner[inner < values.max()]
    edges = [-np.inf, *inner.tolist(), np.inf]
    return list(pairwise(edges))


def _within(values: Floats, bounds: Range) -> Mask:
    return np.asarray((values > bounds[0]) & (values <= bounds[1]))


def _bin(lengths: Floats, ranges: tuple[Range, Range]) -> Bin:
    """Medians as the centre: what half of its turns lie below."""
    low, high = (np.array([r[k] for r in ranges] + [(-np.inf, np.inf)[k]]) for k in (0, 1))
    inside = lengths[((lengths > low) & (lengths <= high)).all(axis=1)]
    medians = np.maximum(np.quantile(inside, 0.5, axis=0, method="inverted_cdf"), 1)
    spread = {
        name: (plain(float(column.min())), plain(float(column.max())))
        for name, column in zip(LENGTHS, inside.T, strict=True)
    }
    centre = {name: plain(float(v)) for name, v in zip(LENGTHS, medians, strict=True)}
    return Bin(low, high, centre, spread)
