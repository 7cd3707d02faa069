"""How every figure looks, and the line under each that says whether its numbers are real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CLASS_COLOURS = {
    "replica": "#222222",
    "remote": "#0072B2",
    "local": "#D55E00",
    "mixed": "#CC79A7",
    "hybrid": "#009E73",
    "pull": "#56B4E9",
    "table": "#E69F00",
    "other": "#8C8C8C",
}
"""Okabe and Ito's colours, which people with any colour vision tell apart."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")

CHARACTERS_PER_INCH = 15
"""Of the small print below a figure."""

_LOOK: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "figure.titlesize": 12.0,
    "figure.titleweight": "bold",
}


@contextmanager
def look() -> Iterator[None]:
    """The project's matplotlib settings, for the length of the block only."""
    with mpl.rc_context(_LOOK):
        yield


LEAST_WIDTH_IN = 6.5
"""Room for a title beside its legend, also above a single panel."""


def grid(panels: int, *, columns: int = 3, width_in: float = 3.5, height_in: float = 2.7) -> Figure:
    """A figure for ``panels`` equal panels; read them with :func:`panels_of`."""
    columns = min(columns, panels)
    width_in = max(width_in, LEAST_WIDTH_IN / columns)
    rows = ceil(panels / columns)
    figure = Figure(figsize=(width_in * columns + 0.4, height_in * rows + 1.3))
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.06)
    FigureCanvasAgg(figure)
    figure.subplots(rows, columns, squeeze=False)
    for spare in figure.axes[panels:]:
        spare.set_axis_off()
    return figure


def one_panel(width_in: float, height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width_in, height_in))
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def origin(source: Mapping[str, Any]) -> str:
    """``SIMULATED`` or ``MEASURED``, and on what, from a manifest or a table's provenance."""
    backend = str(source.get("backend") or "unknown")
    kind = {
        "sim": "SIMULATED, not measured",
        "vllm": "MEASURED on real vLLM",
        "attach": "MEASURED on an attached engine",
        "imported": "MEASURED by others, imported",
    }.get(
        backend, f"PARTLY SIMULATED ({backend})" if "sim+" in backend else f"{backend.upper()} DATA"
    )
    known = (source.get(name) for name in ("model", "gpu", "engine", "connector"))
    return " · ".join([kind, *(str(value) for value in known if value)])


def finish(figure: Figure, title: str, source: Mapping[str, Any], note: str = "") -> Figure:
    """Title above, origin and reading notes below."""
    figure.suptitle(title, x=0.01, ha="left")
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    lines = [origin(source), *note.splitlines()]
    text = "\n".join(fill(line, width) for line in lines)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": "ppdbench"})
    return path


def rate_axis(axes: Axes, rates: list[float]) -> None:
    """Conversation rate on a log axis that names the measured rates."""
    axes.set_xscale("log")
    shown = rates if len(rates) <= 5 else rates[:: ceil(len(rates) / 5)]
    axes.set_xticks(shown, [f"{rate:g}" for rate in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(rates[0] / 1.15, rates[-1] * 1.15)


def decade_ticks(values: list[float]) -> tuple[list[float], list[str]]:
    """Round ticks over the positive ``values``, the denser the fewer decades there are.

    Two tokens in one read are a gap of 0, which a log axis cannot show.
    """
    values = [value for value in values if value > 0] or [1.0]
    low, high = np.floor(np.log10(min(values))), np.ceil(np.log10(max(values)))
    span = max(values) / min(values)
    steps = (1, 3) if span > 100 else (1, 2, 5) if span > 5 else (1, 2, 3, 4, 5, 6, 8)
    ticks = [m * 10.0**e for e in range(int(low), int(high) + 1) for m in steps]
    inside = [tick for tick in ticks if min(values) / 1.6 <= tick <= max(values) * 1.6]
    return inside, [f"{tick:g}" for tick in inside]
