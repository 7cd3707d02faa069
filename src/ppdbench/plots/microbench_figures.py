"""Figures of a micro-benchmark: slowdown, gap distributions, what explains it, the hop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ppdbench.plots import style

Row = Mapping[str, Any]
Document = Mapping[str, Any]

KIND_COLOURS = {"full": "#D55E00", "append": "#0072B2"}
WAY_COLOURS = {"one_node": "#222222", "local": "#D55E00", "remote": "#0072B2"}
SLOWDOWN_TICKS = (-50, -20, -10, -5, 0, 5, 10, 20, 50, 100, 200, 500)
SHADES = (0.35, 0.6, 0.8, 1.0, 1.0, 1.0)
ITL_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 1.0)
"""As the rows keep them; a test holds the two together."""


def microbench_figures(document: Document) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything a micro-benchmark's document can show."""
    if document["protocol"] == "interference":
        yield "slowdown.png", slowdown(document)
        yield "itl.png", gap_distributions(document)
    elif document["protocol"] == "paper":
        yield "paper.png", published_series(document)
        yield "attribution.png", attribution(document)
    else:
        yield "ttft_by_way.png", ttft_by_way(document)
        yield "hop.png", hop(document)


def slowdown(document: Document) -> Figure:
    """Victims' slowdown against the injected new tokens; a panel per batch, a line per context."""
    rows: Sequence[Row] = document["rows"]
    batches = sorted({row["batch"] for row in rows})
    with style.look():
        figure = style.grid(len(batches))
        for axes, batch in zip(figure.axes, batches, strict=False):
            _slowdown_panel(axes, [row for row in rows if row["batch"] == batch])
            axes.set_title(f"{batch} decoding victim{'s' if batch > 1 else ''}")
        _kind_legend(figure.axes[0], sorted({row["context_tokens"] for row in rows}))
        note = (
            "Mean TPOT of the same victims over their next 64 tokens after the injection, against "
            "just before and after. Bars: 95 % intervals"
        )
        return style.finish(
            figure, "How much does one injected prompt slow decode?", document, note
        )


def _slowdown_panel(axes: Axes, rows: Sequence[Row]) -> None:
    contexts = sorted({row["context_tokens"] for row in rows if row["kind"] == "append"})
    for place, context in enumerate(contexts):
        line = [r for r in rows if r["kind"] == "append" and r["context_tokens"] == context]
        _with_bars(axes, line, style.MARKERS[place % 7], KIND_COLOURS["append"], _shade(place))
    _with_bars(axes, [r for r in rows if r["kind"] == "full"], "x", KIND_COLOURS["full"], 1.0)
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set(xscale="log", xlabel="new tokens that are computed", ylabel="slowdown, %")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_yticks(SLOWDOWN_TICKS, map(str, SLOWDOWN_TICKS))
    axes.set_yticks([], minor=True)
    highest = max((r["slowdown_ci"] or [0, r["slowdown_mean"]])[1] for r in rows)
    lowest = min((r["slowdown_ci"] or [r["slowdown_mean"]])[0] for r in rows)
    axes.set_ylim(min(-2.0, lowest * 110), max(10.0, highest * 140))


def _shade(place: int) -> float:
    return SHADES[min(place, len(SHADES) - 1)]


def _with_bars(axes: Axes, rows: Sequence[Row], marker: str, colour: str, alpha: float) -> None:
    rows = sorted(rows, key=lambda row: row["new_tokens"])
    means = np.array([row["slowdown_mean"] for row in rows]) * 100
    bounds = np.array([row["slowdown_ci"] or [row["slowdown_mean"]] * 2 for row in rows]) * 100
    errors = np.abs(bounds.T - means) if rows else None
    axes.errorbar(
        [row["new_tokens"] for row in rows], means, yerr=errors, marker=marker, color=colour,
        alpha=alpha, capsize=2, linewidth=1.1, markersize=4,
    )  # fmt: skip


def _kind_legend(axes: Axes, contexts: Sequence[int]) -> None:
    appends = [context for context in contexts if context]
    handles = [
        Line2D([], [], color=KIND_COLOURS["append"], marker=style.MARKERS[i % 7], alpha=_shade(i),
               label=f"append after {context:,} cached")
        for i, context in enumerate(appends)
    ]  # fmt: skip
    full = Line2D([], [], color=KIND_COLOURS["full"], marker="x", label="full, nothing cached")
    axes.legend(handles=[full, *handles], loc="best", fontsize=7)


def gap_distributions(document: Document) -> Figure:
    """Gaps between victims' tokens: quiet, beside the largest append, beside its full prompt."""
    rows: Sequence[Row] = document["rows"]
    batches = sorted({row["batch"] for row in rows})
    with style.look():
        figure = style.grid(len(batches))
        for axes, batch in zip(figure.axes, batches, strict=False):
            _gap_panel(axes, [row for row in rows if row["batch"] == batch])
        handles = [
            Line2D([], [], color="#8C8C8C", label="quiet"),
            *(Line2D([], [], color=c, label=f"under {k}") for k, c in KIND_COLOURS.items()),
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=3)
        note = "Gaps of the victims in the window of 64 tokens; right end: the largest"
        return style.finish(figure, "Gaps between a victim's tokens", document, note)


def _gap_panel(axes: Axes, rows: Sequence[Row]) -> None:
    appends = [row for row in rows if row["kind"] == "append"]
    chosen = max(appends or rows, key=lambda row: (row["context_tokens"], row["new_tokens"]))
    total = chosen["context_tokens"] + chosen["new_tokens"]
    twins = [row for row in rows if row["kind"] == "full" and row["new_tokens"] == total]
    shares = [(1 - share) * 100 for share in ITL_SHARES]
    shares[-1] = shares[-2] / 4  # the largest gap needs a place on a log axis
    curves = [(chosen["itl_quiet_curve_s"], "#8C8C8C")]
    curves += [(row["itl_curve_s"], KIND_COLOURS[row["kind"]]) for row in (chosen, *twins[:1])]
    for curve, colour in curves:
        axes.plot([gap * 1e3 for gap in curve], shares, color=colour, marker=".", markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="gap, ms", ylabel="gaps longer than this, %")
    axes.set_xticks(*style.decade_ticks([gap * 1e3 for curve, _ in curves for gap in curve]))
    axes.set_xticks([], minor=True)
    axes.set_title(
        f"batch {chosen['batch']}, {chosen['context_tokens']:,} + {chosen['new_tokens']:,} tokens"
    )


def published_series(document: Document) -> Figure:
    """The published test over batch sizes, beside the paper's and January's figures."""
    rows = [r for r in document["rows"] if r["injected"] == 1 and r["prefix_tokens"] == 2048]
    forms = [
        f for f in ("published", "cascade_off", "january") if any(r["form"] == f for r in rows)
    ]
    with style.look():
        figure = style.grid(len(forms), width_in=4.0, height_in=3.2)
        for axes, form in zip(figure.axes, forms, strict=False):
            _series_panel(axes, [row for row in rows if row["form"] == form])
            _published_marks(axes, document["published"], form)
            axes.set_title(_form_title(form))
        figure.legend(handles=_series_handles(), loc="outside upper right", ncols=4)
        note = "One prompt beside b decodes over a shared 2,048-token prefix. Bars: 95 % intervals"
        return style.finish(figure, "The published interference test", document, note)


def _form_title(form: str) -> str:
    return {
        "published": "as published (append 1,024)",
        "cascade_off": "without cascade attention",
        "january": "as in January (append 128)",
    }[form]


def _series_panel(axes: Axes, rows: Sequence[Row]) -> None:
    for kind, colour in KIND_COLOURS.items():
        line = sorted((r for r in rows if r["kind"] == kind), key=lambda row: row["batch"])
        means = np.array([row["slowdown_mean"] for row in line]) * 100
        bounds = np.array([r["slowdown_ci"] or [r["slowdown_mean"]] * 2 for r in line]) * 100
        errors = np.abs(bounds.T - means) if line else None
        axes.errorbar([row["batch"] for row in line], means, yerr=errors, color=colour,
                      marker="o", capsize=2, markersize=4)  # fmt: skip
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set(xlabel="decodes in the batch", ylabel="TPOT slowdown, %")


def _published_marks(axes: Axes, published: Mapping[str, Any], form: str) -> None:
    name = {"published": "paper", "january": "january_raw"}.get(form)
    if name is None:
        return
    figures = published[name]
    for kind, colour in KIND_COLOURS.items():
        axes.plot(figures["batch"], figures[kind] * 100, marker="*", markersize=12, color=colour,
                  markeredgecolor="black", markeredgewidth=0.6, linestyle="none")  # fmt: skip


def _series_handles() -> list[Line2D]:
    measured = [
        Line2D([], [], color=colour, marker="o", label=kind)
        for kind, colour in KIND_COLOURS.items()
    ]
    star = Line2D([], [], color="white", marker="*", markersize=11, markeredgecolor="black",
                  linestyle="none", label="the authors' H100")  # fmt: skip
    return [*measured, star]


def attribution(document: Document) -> Figure:
    """Bars: the share of the gap between full and append that each control removes."""
    controls: Sequence[Row] = document["controls"]
    with style.look():
        figure, axes = style.one_panel(8.4, 1.7 + 0.42 * len(controls))
        places = np.arange(len(controls))[::-1]
        for place, row in zip(places, controls, strict=True):
            _bar(axes, float(place), row)
        axes.set_yticks(places, [_control_name(row) for row in controls])
        axes.axvline(100, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(xlabel="share of the gap (full − append) that goes with the control, %")
        axes.set_xlim(-12, 125)
        axes.grid(visible=False, axis="y")
        note = f"Batch {controls[0]['batch']}, one injected prompt. Bars: 95 % intervals"
        return style.finish(figure, "What explains the published gap?", document, note)


def _control_name(row: Row) -> str:
    return str(row["control"]).replace("_", " ")


def _bar(axes: Axes, place: float, row: Row) -> None:
    if row["removed"] is None:
        text = row["reason"] if row["testable"] else f"not testable: {row['reason']}"
        axes.text(0, place, f" {text}", va="center", fontsize=7.5, color="#555555")
        return
    removed = row["removed"] * 100
    bounds = row["removed_ci"] or [row["removed"]] * 2
    errors = [[abs(removed - bounds[0] * 100)], [abs(bounds[1] * 100 - removed)]]
    axes.barh(place, removed, xerr=errors, color="#56B4E9", height=0.6, capsize=3)
    axes.text(max(removed, bounds[1] * 100, 0) + 2, place, f"{removed:.0f} %", va="center")


def ttft_by_way(document: Document) -> Figure:
    """TTFT against prompt tokens; a panel per load, a line per way and cached share."""
    rows: Sequence[Row] = document["rows"]
    loads = sorted({row["load_streams"] for row in rows})
    with style.look():
        figure = style.grid(len(loads), width_in=4.4, height_in=3.4)
        for axes, load in zip(figure.axes, loads, strict=False):
            _way_panel(axes, [row for row in rows if row["load_streams"] == load])
            axes.set_title("idle" if load == 0 else f"beside {load} decodes")
        figure.legend(handles=_way_handles(), loc="outside upper right", ncols=4)
        note = (
            "Equal prompts. Solid: nothing cached; dashed: about half; dotted: about nine tenths. "
            "Bars: 95 % intervals"
        )
        return style.finish(figure, "Time to first token, by way", document, note)


def _way_handles() -> list[Line2D]:
    names = {"one_node": "one node", "local": "local on D", "remote": "through P to D"}
    return [Line2D([], [], color=c, marker="o", label=names[w]) for w, c in WAY_COLOURS.items()]


def _way_panel(axes: Axes, rows: Sequence[Row]) -> None:
    for way, colour in WAY_COLOURS.items():
        for place, low in enumerate((0.0, 0.3, 0.7)):
            high = (0.3, 0.7, 1.0)[place]
            line = [r for r in rows if r["way"] == way and low <= _share(r) < high]
            _way_line(axes, line, colour, ("-", "--", ":")[place])
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="TTFT mean, ms")
    for values, ticks in (
        ([row["prompt_tokens"] for row in rows], axes.set_xticks),
        ([row["ttft_s"] * 1e3 for row in rows], axes.set_yticks),
    ):
        ticks(*style.decade_ticks(values))
        ticks([], minor=True)


def _share(row: Row) -> float:
    return float(row["context_tokens"] / row["prompt_tokens"])


def _way_line(axes: Axes, rows: Sequence[Row], colour: str, dashes: str) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["prompt_tokens"])
    means = np.array([row["ttft_s"] for row in rows]) * 1e3
    bounds = np.array([row["ttft_ci"] or [row["ttft_s"]] * 2 for row in rows]) * 1e3
    axes.errorbar([row["prompt_tokens"] for row in rows], means, yerr=np.abs(bounds.T - means),
                  color=colour, linestyle=dashes, marker="o", markersize=3, capsize=2,
                  linewidth=1.2)  # fmt: skip


def hop(document: Document) -> Figure:
    """What the way through P adds, against the tokens that move, with the fitted line."""
    fits = {load: fit for load, fit in document["fits"].items() if fit is not None}
    with style.look():
        figure = style.grid(max(1, len(fits)), width_in=4.4, height_in=3.2)
        for axes, (load, fit) in zip(figure.axes, fits.items(), strict=False):
            _hop_panel(axes, fit)
            axes.set_title("idle" if load == "0" else f"beside {load} decodes")
        note = str(document["finding"]).replace("; ", ";\n")
        return style.finish(figure, "What the P→D hop costs", document, note)


def _hop_panel(axes: Axes, fit: Row) -> None:
    points = fit["residuals"]
    moved = np.array([point["moved_tokens"] for point in points])
    axes.plot(moved, [point["hop_s"] * 1e3 for point in points], "o", color="#0072B2")
    line = np.linspace(0, moved.max(), 50)
    axes.plot(line, (fit["fixed_s"] + fit["per_token_s"] * line) * 1e3, color="#222222")
    axes.set(xlabel="tokens that move", ylabel="TTFT through P→D less alone, ms")
