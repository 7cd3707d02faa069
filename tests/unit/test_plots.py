"""Figures: what is drawn, what is left out, and that each says whether it is real."""

from __future__ import annotations

import json

import pytest

from ppdbench.core.errors import NothingUsableError, TableError, UsageError
from ppdbench.experiments.microbench import measure
from ppdbench.experiments.microbench.attribution_run import AttributionPlan
from ppdbench.experiments.microbench.bench import (
    Manner,
    run_attribution,
    run_handoff,
    run_interference,
)
from ppdbench.experiments.microbench.engines import Chosen
from ppdbench.experiments.microbench.handoff import HandoffPlan
from ppdbench.experiments.microbench.plan import InterferencePlan
from ppdbench.experiments.microbench.results import read_result, write_result
from ppdbench.plots import microbench_figures, style
from ppdbench.plots.draw import draw
from ppdbench.plots.run_figures import against_rate, plane
from ppdbench.plots.series import SeriesKey, curve, route_class
from ppdbench.table.schema import Cell, Table, save_table
from ppdbench.table.score import STATISTICS, Rule, Side


def point(topology="2P_2D", policy="remote", rate=2.0, repeat=0, ttft_s=0.1, **changes):
    stats = {"ttft_s": {"mean": ttft_s, "p50": ttft_s}, "tpot_s": {"mean": 0.01, "p50": 0.01}}
    return {
        "topology": topology, "policy": policy, "workload": "small", "rate_per_s": rate,
        "repeat": repeat, "validity": [], "success": 1.0, "turn2plus": {"n": 40, **stats},
    } | changes  # fmt: skip


def side(ttft_s, success=1.0):
    ttft, tpot = dict.fromkeys(STATISTICS, ttft_s), dict.fromkeys(STATISTICS, 0.01)
    return Side(40, success, ttft, tpot, tpot)


def cell(rate, local_ttft_s=0.1, *, topology="2P_2D", remote=1.0, local=1.0):
    centre = {"context_tokens": 256, "new_tokens": 64, "output_tokens": 64, "rate_per_s": rate}
    return Cell(
        topology=topology, workload="w", backend="vllm", centre=centre,
        remote=side(0.2, remote), local=side(local_ttft_s, local),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "policy", "expected"),
    [
        ("4R", "roles", "replica"),
        ("2P_2D", "roles", "remote"),
        ("2P_2D", "local", "local"),
        ("2P_2pD", "roles", "local"),
        ("2P_1D_1pD", "roles", "mixed"),
        ("2P_2D", "share:0.5", "mixed"),
        ("1R_1P_2D", "roles", "hybrid"),
        ("2P_2D", "table:t.json", "table"),
        ("2P_2D", "threshold:512", "other"),
    ],
)
def test_a_line_is_coloured_by_what_it_does_with_later_turns(topology, policy, expected):
    """The class follows from topology and policy together, never from a name alone."""
    assert route_class(SeriesKey(topology, policy)) == expected


def test_a_point_that_may_not_vote_is_not_drawn():
    """Barred and failing points are left out of curves; flags alone are not a bar."""
    good = point(ttft_s=0.2, validity=["too_few"])
    barred = point(repeat=1, ttft_s=9.0, validity=["path_unproven"])
    failing = point(repeat=2, ttft_s=9.0, success=0.5)

    spread = curve([good, barred, failing], "ttft_s", "p50")[2.0]

    assert (spread.low, spread.mean, spread.high) == (0.2, 0.2, 0.2)


def test_every_figure_states_whether_it_was_measured():
    """Real, simulated and imported numbers can never be confused."""
    assert style.origin({"backend": "sim"}).startswith("SIMULATED")
    assert style.origin({"backend": "vllm", "model": "m"}) == "MEASURED on real vLLM · m"
    shown = against_rate([point()], {"backend": "sim"}, "ttft_s", "p50").get_supxlabel()

    assert "SIMULATED" in shown


def test_a_missing_replica_baseline_is_said():
    """The plane names its replicas, and says so loudly when the run holds none."""
    without = plane([point()], {}).get_supxlabel()
    with_it = plane([point(), point(topology="4R", policy="roles")], {}).get_supxlabel()

    assert "NO BASELINE" in without
    assert "4R" in with_it


def test_a_run_becomes_pngs_and_a_summary(tmp_path):
    """Files land straight in DIR and the summary counts what the figures show."""
    run = tmp_path / "run"
    run.mkdir()
    points = [point(), point(policy="local"), point(topology="4R", policy="roles", success=0.1)]
    (run / "points.jsonl").write_text("".join(json.dumps(p) + "\n" for p in points))
    (run / "manifest.json").write_text('{"backend": "sim"}')

    summary = draw(run, tmp_path / "out")

    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["points"], summary["usable"], summary["simulated"]) == (3, 2, True)
    for name in summary["figures"]:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_a_table_becomes_a_heat_map(tmp_path):
    """Every status can be drawn, a cell without S included."""
    cells = (
        cell(2.0), cell(4.0, 0.3), cell(8.0, remote=0.0),
        cell(2.0, topology="1P_3D", remote=0.0, local=0.0),
    )  # fmt: skip
    table = tmp_path / "t.json"
    save_table(Table(Rule(), {"backend": "vllm"}, cells), table)

    summary = draw(table, tmp_path / "out")

    assert summary["by_decision"] == {"local": 2, "remote": 1, "undecided": 1}
    assert (tmp_path / "out" / "table.png").exists()


def test_a_table_of_another_version_is_not_drawn(tmp_path):
    """A figure of a table that no other command reads would be believed."""
    table = tmp_path / "t.json"
    save_table(Table(Rule(), {"backend": "vllm"}, (cell(2.0),)), table)
    table.write_text(table.read_text().replace('"schema_version": 1', '"schema_version": 2'))

    with pytest.raises(TableError, match="schema version 2"):
        draw(table, tmp_path / "out")


def test_what_cannot_be_drawn_is_refused_with_a_sentence(tmp_path):
    """A missing path, a text file and an empty run each say what was expected."""
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    empty = tmp_path / "run"
    empty.mkdir()
    (empty / "points.jsonl").write_text("")
    (empty / "manifest.json").write_text("{}")

    with pytest.raises(UsageError, match="run folder"):
        draw(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(UsageError, match="not readable as JSON"):
        draw(text, tmp_path / "out")
    with pytest.raises(NothingUsableError, match="no finished point"):
        draw(empty, tmp_path / "out")


PLANS = {
    "interference": InterferencePlan((1, 2), (0, 512), (64, 128), repeats=2),
    "paper": AttributionPlan((8, 32), 32, injected=(1,), long_prefixes=(), repeats=2,
                             no_cascade_switch="no switch here"),
    "handoff": HandoffPlan((512, 1024, 4096), (0.0, 0.5), (0, 2), repeats=2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "figures"),
    [
        ("interference", ["slowdown.png", "itl.png"]),
        ("paper", ["paper.png", "attribution.png"]),
        ("handoff", ["ttft_by_way.png", "hop.png"]),
    ],
)
def test_a_micro_benchmark_becomes_its_figures(protocol, figures, tmp_path):
    """Each protocol has its own, from the document that ppd microbench writes."""
    run = {"interference": run_interference, "paper": run_attribution, "handoff": run_handoff}
    options = {"explicit": True} if protocol == "interference" else {}
    finished = run[protocol](Chosen("sim"), PLANS[protocol], Manner(print), **options)
    folder = tmp_path / "micro"
    write_result(folder, finished.manifest, finished.document, finished.records)

    summary = draw(folder, tmp_path / "out")

    assert read_result(folder) == json.loads(json.dumps(finished.document))
    assert summary["figures"] == figures
    assert summary["simulated"]
    for name in figures:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_figures_and_rows_agree_on_the_shares_of_gaps():
    """The figure's axis and the rows' curves are one list."""
    assert microbench_figures.ITL_SHARES == measure.ITL_SHARES


def test_gaps_of_zero_have_no_place_on_a_log_axis():
    """Two tokens that a starved client reads at once are 0 s apart; ticks leave them out."""
    assert style.decade_ticks([0.0, 1.0, 8.0]) == style.decade_ticks([1.0, 8.0])
    assert style.decade_ticks([0.0])[1] == style.decade_ticks([1.0])[1]


def test_a_micro_benchmark_without_a_row_is_not_drawn(tmp_path):
    """It is a sentence and exit code 1, as for a run without a point."""
    (tmp_path / "microbench.json").write_text('{"protocol": "interference", "rows": []}')

    with pytest.raises(NothingUsableError, match="measured no row"):
        draw(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("panels", [1, 2])
def test_a_title_fits_above_few_panels(panels):
    """The longest title of a micro-benchmark is not cut by the figure's edge."""
    with style.look():
        figure = style.grid(panels)
        style.finish(figure, "How much does one injected prompt slow decode?", {})
        figure.draw_without_rendering()
        title = figure.texts[0].get_window_extent()

    assert title.x1 <= figure.bbox.x1
