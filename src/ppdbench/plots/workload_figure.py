"""What a workload's conversations look like: turns and lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppdbench.plots import style


def workload_figure(columns: Mapping[str, Sequence[float]], title: str) -> Figure:
    """One panel per non-empty column: the share of its entries at most as large as x."""
    shown = {name: np.sort(np.asarray(values)) for name, values in columns.items() if len(values)}
    with style.look():
        figure = style.grid(len(shown), columns=2)
        figure.suptitle(title)
        for panel, (name, values) in zip(figure.axes, shown.items(), strict=False):
            _cumulative(panel, name, values)
    return figure


def _cumulative(panel: Axes, name: str, values: np.ndarray) -> None:
    """Zero, as in the context before Turn 1, stands at 1: a log axis has no 0."""
    shown = np.maximum(values, 1)
    share = np.arange(1, len(values) + 1) / len(values)
    panel.step(shown, share, where="post", color=style.CLASS_COLOURS["remote"])
    panel.set_xscale("log")
    panel.set_xticks(*_decades(float(shown[0]), float(shown[-1])))
    panel.set_xticks([], minor=True)
    panel.set_ylim(0, 1)
    panel.set_title(name)
    panel.set_ylabel("share up to this")
    _mark(panel, float(np.quantile(shown, 0.5)), "p50", side=1, height=0.04)
    _mark(panel, float(np.quantile(shown, 0.99)), "p99", side=-1, height=0.12)


def _decades(low: float, high: float) -> tuple[list[float], list[str]]:
    """Tick at powers of ten, or at 1–2–5 where fewer than two decades are shown."""
    steps = (1, 2, 5) if high / low < 100 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [m * 10.0**e for e in range(first, last + 1) for m in steps]
    inside = [tick for tick in ticks if low / 1.2 <= tick <= high * 1.2]
    return inside, [f"{tick:,.0f}" for tick in inside]


def _mark(panel: Axes, at: float, name: str, *, side: int, height: float) -> None:
    panel.axvline(at, color=style.CLASS_COLOURS["other"], linewidth=0.8, linestyle="--")
    panel.annotate(
        f"{name} {at:,.0f}",
        (at, height),
        xytext=(3 * side, 0),
        textcoords="offset points",
        ha="left" if side > 0 else "right",
        fontsize=7.5,
    )
