"""Predicted against measured, one dot per point of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

BAND = 0.2


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
