"""A decision table as heat maps: what it decides, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppdbench.plots import style

Cell = Mapping[str, Any]
Shape = tuple[float, float, float]

NARROWEST_IN = 8.0
"""Title and notes must fit above and below a single panel."""

TITLE = "Where should a later turn be computed?"

_SIGNS = {"local": "L", "remote": "R", "undecided": "?"}


def table_figures(document: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything a table can show; ``document`` is its JSON."""
    yield "table.png", heat_map(document)


def heat_map(document: Mapping[str, Any]) -> Figure:
    """One panel per topology: turn shapes down, rates across, colour S, letter the decision."""
    cells: Sequence[Cell] = document["cells"]
    topologies = list(dict.fromkeys(str(cell["topology"]) for cell in cells))
    rows = len({_shape(cell) for cell in cells})
    with style.look():
        rates = len({float(cell["rate_per_s"]) for cell in cells})
        figure = style.grid(
            len(topologies), columns=2,
            width_in=max(NARROWEST_IN / min(2, len(topologies)), 5.0, 2.6 + 0.42 * rates),
            height_in=0.9 + 0.25 * rows,
        )  # fmt: skip
        limit = _limit(cells)
        for axes, topology in zip(figure.axes, topologies, strict=False):
            image = _panel(axes, [c for c in cells if c["topology"] == topology], limit)
            axes.set_title(topology)
        bar = figure.colorbar(image, ax=figure.axes, shrink=0.7, pad=0.02)
        bar.set_label("S: positive favours local")
        source = document.get("provenance") or {}
        return style.finish(figure, TITLE, source, f"{_rule(document)}\n{_note(cells)}")


def _panel(axes: Axes, cells: Sequence[Cell], limit: float) -> Any:  # noqa: ANN401
    shapes = sorted({_shape(cell) for cell in cells})
    rates = sorted({float(cell["rate_per_s"]) for cell in cells})
    scores = np.full((len(shapes), len(rates)), np.nan)
    for cell in cells:
        place = shapes.index(_shape(cell)), rates.index(float(cell["rate_per_s"]))
        scores[place] = np.nan if cell.get("s") is None else cell["s"]
        ink = "white" if abs(np.nan_to_num(scores[place])) > 0.7 * limit else "black"
        axes.text(place[1], place[0], _sign(cell), ha="center", va="center", fontsize=7, color=ink)
    image = axes.imshow(scores, aspect="auto", cmap="PuOr_r", vmin=-limit, vmax=limit)
    axes.grid(visible=False)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(shapes)), [_shape_name(shape) for shape in shapes])
    axes.set(xlabel="conversations per s", ylabel="context + new → output tokens")
    axes.set_facecolor("#DDDDDD")
    return image


def _shape(cell: Cell) -> Shape:
    return (
        float(cell["context_tokens"]), float(cell["new_tokens"]), float(cell["output_tokens"])
    )  # fmt: skip


def _shape_name(shape: Shape) -> str:
    context, new, output = (f"{tokens:,.0f}" for tokens in shape)
    return f"{context} + {new} → {output}"


def _sign(cell: Cell) -> str:
    """A letter for the decision; ``·`` where only one side was usable, ``×`` where none was."""
    status = cell.get("status")
    if status == "failed":
        return "×"
    letter = _SIGNS.get(str(cell.get("decision")), "?")
    return {"one_sided": f"{letter}·", "interpolated": letter.lower()}.get(str(status), letter)


def _limit(cells: Sequence[Cell]) -> float:
    scores = [abs(float(cell["s"])) for cell in cells if cell.get("s") is not None]
    return max(0.1, float(np.quantile(scores, 0.95))) if scores else 1.0


def _rule(document: Mapping[str, Any]) -> str:
    weights = document.get("weights") or {}
    shown = ", ".join(f"{name} {weight:g}" for name, weight in sorted(weights.items()))
    return f"S of the {document.get('statistic', 'mean')}, weights {shown or 'not given'}."


def _note(cells: Sequence[Cell]) -> str:
    return (
        f"{len(cells)} cells. L local, R remote, ? undecided (the interval of S holds 0), "
        "lower case filled in, · only one side usable, × neither. Grey: no S"
    )
