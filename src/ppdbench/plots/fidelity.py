"""Predicted against measured, one dot per point of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppdbench.plots.style import CLASS_COLOURS, MARKERS, finish, grid, look

BAND = 0.2
LIVE_BAND = 0.1
TICKS = 4
PANELS = {"TTFT, Turn 2+": "ttft_later", "TTFT, Turn 1": "ttft_first", "TPOT": "tpot"}
"""Title and the metric's name in ``live.json`` without its quantile."""


def fidelity_figure(
    title: str,
    by_topology: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    fitted: Sequence[str],
) -> Figure:
    """``by_topology`` holds (measured, predicted) in seconds; axes are logarithmic, in ms."""
    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.add_subplot()
    low = min(min(x) for x, _ in by_topology.values()) * 1e3
    high = max(max(x) for x, _ in by_topology.values()) * 1e3
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    for factor in (1 - BAND, 1 + BAND):
        axes.plot([low, high], [low * factor, high * factor], color="grey", linestyle=":")
    for name, (x, y) in by_topology.items():
        marker, label = ("x", f"{name} (fitted)") if name in fitted else (".", name)
        axes.plot(
            [s * 1e3 for s in x], [s * 1e3 for s in y], marker, markersize=4, label=label, alpha=0.6
        )
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="measured on 4× H100, ms", ylabel="predicted, ms (dotted: ±20 %)")
    axes.legend(fontsize=6, ncols=2)
    return figure


def live_figure(points: Sequence[Mapping[str, Any]], source: Mapping[str, Any]) -> Figure:
    """Three panels of points as in ``live.json``; ``source`` says what served the real run."""
    with look():
        figure = grid(len(PANELS))
        for axes, (title, name) in zip(figure.axes, PANELS.items(), strict=True):
            _live_panel(axes, title, name, points)
        figure.axes[0].set_ylabel("predicted, ms")
        figure.axes[0].legend()
        note = "Each mark is a point of the run. Filled: p50, hollow: p95. Dotted: ±10 %."
        return finish(figure, "The simulator against a real run", source, note)


def _live_panel(axes: Axes, title: str, name: str, points: Sequence[Mapping[str, Any]]) -> None:
    seen: list[float] = []
    routes = sorted({point["route"] for point in points})
    for route, marker in zip(routes, MARKERS, strict=False):
        mine = [point["figures"] for point in points if point["route"] == route]
        for quantile, fill in (("p50", CLASS_COLOURS[route]), ("p95", "none")):
            known = [found for f in mine if (found := f[f"{name}_{quantile}"])]
            x, y = ([f[side] * 1e3 for f in known] for side in ("real_s", "predicted_s"))
            axes.scatter(
                x, y, s=18, marker=marker, alpha=0.8, facecolors=fill,
                edgecolors=CLASS_COLOURS[route], label=route if quantile == "p50" else None,
            )  # fmt: skip
            seen += [*x, *y]
    axes.set(xscale="log", yscale="log", title=title, xlabel="real, ms")
    if seen:
        _identity(axes, min(seen), max(seen))


def _identity(axes: Axes, low: float, high: float) -> None:
    """The line, its band, and a few plain ticks: less than a decade has no good ones of its own."""
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    for factor in (1 - LIVE_BAND, 1 + LIVE_BAND):
        axes.plot([low, high], [low * factor, high * factor], color="grey", linestyle=":")
    ticks = np.geomspace(low, high, TICKS)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
        axis.set_ticks(ticks, [f"{tick:.3g}" for tick in ticks])
