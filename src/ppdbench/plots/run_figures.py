"""Figures of a run: latency of later turns against rate, the TTFT–TPOT plane, what may vote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppdbench.plots import style
from ppdbench.plots.series import (
    Point,
    SeriesKey,
    Spread,
    curve,
    rates_of,
    route_class,
    select,
    series_of,
    workloads_of,
)
from ppdbench.runs.validity import MIN_SUCCESS, NEVER_VOTES

CROWD = 8
"""More lines than this are drawn thin and told apart by class, not one by one."""

Manifest = Mapping[str, Any]


def run_figures(points: Sequence[Point], manifest: Manifest) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything a run can show."""
    yield "ttft.png", against_rate(points, manifest, "ttft_s", "p50")
    yield "tpot.png", against_rate(points, manifest, "tpot_s", "mean")
    yield "plane.png", plane(points, manifest)
    yield "validity.png", validity(points, manifest)


def against_rate(
    points: Sequence[Point], manifest: Manifest, metric: str, statistic: str
) -> Figure:
    """One panel per workload: a Turn 2+ metric against conversations per second."""
    name = metric.removesuffix("_s").upper()
    workloads, series = workloads_of(points), series_of(points)
    with style.look():
        figure = style.grid(len(workloads), columns=_columns(len(workloads)))
        for axes, workload in zip(figure.axes, workloads, strict=False):
            _curves(axes, points, series, workload, (metric, statistic))
            axes.set_title(workload)
            axes.set_ylabel(f"{name} {statistic}, ms")
            axes.set_xlabel("conversations per s")
        _legend(figure, series)
        note = (
            "Turn 2+. Mean over repeats; band: lowest to highest repeat. "
            "Points that may not vote are left out"
        )
        return style.finish(figure, f"{name} of later turns, by route and topology", manifest, note)


def plane(points: Sequence[Point], manifest: Manifest) -> Figure:
    """TTFT against TPOT of later turns, one line per series through its rates; down-left wins."""
    workloads, series = workloads_of(points), series_of(points)
    with style.look():
        figure = style.grid(len(workloads), columns=_columns(len(workloads)))
        for axes, workload in zip(figure.axes, workloads, strict=False):
            _plane_panel(axes, points, series, workload)
            axes.set_title(workload)
        _legend(figure, series)
        return style.finish(
            figure, "TTFT and TPOT of later turns", manifest, _plane_note(points, series)
        )


def validity(points: Sequence[Point], manifest: Manifest) -> Figure:
    """Success per series, workload and rate; a cross marks what may never vote."""
    series, columns = series_of(points), _columns_of(points)
    success, barred = _success_matrix(points, series, columns)
    with style.look():
        width = min(3.2 + max(4.0, 0.11 * len(columns)), 15.0)
        figure, axes = style.one_panel(width, 2.2 + 0.28 * len(series))
        image = axes.imshow(success, aspect="auto", vmin=0, vmax=1, cmap=_success_colours())
        rows, cells = np.nonzero(barred)
        axes.scatter(cells, rows, marker="x", s=14, color="#D55E00", linewidths=1.0)
        _name_matrix(axes, series, columns)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01)
        bar.set_label("turns that succeeded")
        return style.finish(
            figure, "What may vote", manifest, _validity_note(points, int(barred.sum()))
        )


def _columns(panels: int) -> int:
    return 3 if panels <= 9 else ceil(panels / 4)


def _curves(
    axes: Axes,
    points: Sequence[Point],
    series: Sequence[SeriesKey],
    workload: str,
    what: tuple[str, str],
) -> None:
    highest: list[float] = []
    for key in series:
        line = curve(select(points, key, workload), *what)
        if line:
            _draw(axes, line, _line_style(key, series))
            highest += [spread.mean * 1e3 for spread in line.values()]
    style.rate_axis(axes, rates_of(points))
    if highest and max(highest) > 8 * min(highest):
        axes.set_yscale("log")
        axes.set_yticks(*style.decade_ticks(highest))
        axes.set_yticks([], minor=True)
    else:
        axes.set_ylim(bottom=0)


def _draw(axes: Axes, line: Mapping[float, Spread], look: Mapping[str, Any]) -> None:
    rates = list(line)
    axes.plot(rates, [spread.mean * 1e3 for spread in line.values()], **look)
    low = [spread.low * 1e3 for spread in line.values()]
    high = [spread.high * 1e3 for spread in line.values()]
    if low != high:
        axes.fill_between(rates, low, high, color=look["color"], alpha=0.13, linewidth=0)


def _line_style(key: SeriesKey, series: Sequence[SeriesKey]) -> dict[str, Any]:
    kind = route_class(key)
    peers = [other for other in series if route_class(other) == kind]
    place = peers.index(key)
    crowded = len(series) > CROWD and kind != "replica"
    return {
        "color": style.CLASS_COLOURS[kind],
        "linestyle": style.LINES[place % len(style.LINES)],
        "marker": style.MARKERS[place % len(style.MARKERS)],
        "alpha": 0.7 if crowded else 1.0,
        "linewidth": 0.9 if crowded else 1.6,
        "markersize": 2.5 if crowded else 4.5,
        "zorder": 4 if kind == "replica" else 3,
    }


def _legend(figure: Figure, series: Sequence[SeriesKey]) -> None:
    handles = [Line2D([], [], label=key.label, **_line_style(key, series)) for key in series]
    figure.legend(handles=handles, loc="outside upper right", ncols=min(6, len(handles)))


def _plane_panel(
    axes: Axes, points: Sequence[Point], series: Sequence[SeriesKey], workload: str
) -> None:
    across: list[float] = []
    for key in series:
        chosen = select(points, key, workload)
        ttft, tpot = curve(chosen, "ttft_s", "mean"), curve(chosen, "tpot_s", "mean")
        rates = [rate for rate in ttft if rate in tpot]
        if rates:
            xs, ys = ([line[r].mean * 1e3 for r in rates] for line in (ttft, tpot))
            axes.plot(xs, ys, **_line_style(key, series))
            axes.annotate(f"{rates[-1]:g}/s", (xs[-1], ys[-1]), xytext=(3, 3),
                          textcoords="offset points", fontsize=6, color="#555555")  # fmt: skip
            across += xs
    axes.set(xlabel="TTFT mean, ms", ylabel="TPOT mean, ms", xscale="log")
    if across:
        axes.set_xticks(*style.decade_ticks(across))
        axes.set_xticks([], minor=True)


def _plane_note(points: Sequence[Point], series: Sequence[SeriesKey]) -> str:
    nodes = sorted({key.topology for key in series if route_class(key) == "replica"})
    baseline = f"Sticky replicas ({', '.join(nodes)}) in black." if nodes else (
        "NO BASELINE: this run holds no replica topology (such as 4R); measure one before choosing."
    )  # fmt: skip
    rates = ", ".join(f"{rate:g}" for rate in rates_of(points))
    return f"Down and left is better. A line joins the rates {rates} per s. {baseline}"


def _columns_of(points: Sequence[Point]) -> list[tuple[str, float]]:
    return [(w, r) for w in workloads_of(points) for r in rates_of(points)]


def _success_matrix(
    points: Sequence[Point], series: Sequence[SeriesKey], columns: Sequence[tuple[str, float]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lowest success over repeats (NaN: not measured), and whether any repeat is barred."""
    success = np.full((len(series), len(columns)), np.nan)
    barred = np.zeros(success.shape, dtype=bool)
    row_of = {key: row for row, key in enumerate(series)}
    column_of = {column: place for place, column in enumerate(columns)}
    for point in points:
        row = row_of[SeriesKey(str(point["topology"]), str(point["policy"]))]
        place = column_of[(str(point["workload"]), float(point["rate_per_s"]))]
        share = point.get("success")
        success[row, place] = np.fmin(success[row, place], np.nan if share is None else share)
        barred[row, place] |= bool(NEVER_VOTES & set(point.get("validity") or ()))
    return success, barred


def _success_colours() -> ListedColormap:
    """Grey-blue when enough succeed, ever darker orange below ``MIN_SUCCESS``; white: no data."""
    shades = np.linspace(0, 1, 200)
    low, high = np.array([0.45, 0.16, 0.02]), np.array([0.99, 0.75, 0.44])
    colours = [
        (0.80, 0.87, 0.93) if s >= MIN_SUCCESS else tuple(low + (high - low) * s / MIN_SUCCESS)
        for s in shades
    ]
    return ListedColormap(colours)


def _name_matrix(
    axes: Axes, series: Sequence[SeriesKey], columns: Sequence[tuple[str, float]]
) -> None:
    axes.grid(visible=False)
    axes.set_yticks(range(len(series)), [key.label for key in series])
    names = list(dict.fromkeys(workload for workload, _ in columns))
    width = len(columns) // len(names)
    middles = [width * i + (width - 1) / 2 for i in range(len(names))]
    axes.set_xticks(middles, names, rotation=35, ha="right")
    axes.set_xlabel(f"workload, and in each the rates {columns[0][1]:g} … {columns[-1][1]:g} per s")
    for edge in range(1, len(names)):
        axes.axvline(width * edge - 0.5, color="white", linewidth=1.6)


def _validity_note(points: Sequence[Point], barred: int) -> str:
    good = sum(not (point.get("validity") or ()) for point in points)
    return (
        f"{len(points)} points, {good} without any code. Colour: lowest success over repeats; "
        f"orange is below {MIN_SUCCESS:.0%}. "
        f"Cross: a code that bars the point from voting ({barred} cells)."
    )
