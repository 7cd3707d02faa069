"""The comparison with a real run, on made-up points whose errors are known."""

from __future__ import annotations

import pytest

from ppdbench.core.decision import Route
from ppdbench.core.errors import NothingUsableError
from ppdbench.experiments.fidelity_live import matched, report
from ppdbench.experiments.fidelity_live_table import as_markdown
from ppdbench.plots.fidelity import live_figure
from ppdbench.runs.records import TurnRecord


def point(policy="remote", ttft_s=0.100, tpot_s=0.010, *, rate=1.0, validity=(), topology="1P_1D"):
    """Every quantile of a class is the same; Turn 1 takes twice as long."""
    turns = {
        "turn1": (2 * ttft_s, tpot_s),
        "turn2plus": (ttft_s, tpot_s),
        "all": (ttft_s, tpot_s),
    }
    return {
        "topology": topology, "policy": policy, "workload": "w", "rate_per_s": rate, "repeat": 0,
        "validity": list(validity),
        **{
            name: {"n": 7, "ttft_s": both(ttft), "tpot_s": both(tpot)}
            for name, (ttft, tpot) in turns.items()
        },
    }  # fmt: skip


def both(value_s):
    return {"p50": value_s, "p95": value_s}


def none_kept(_key):
    return []


def compared(live, predicted, real_turns=none_kept, predicted_turns=none_kept):
    return report(live, predicted, real_turns, predicted_turns)


def test_an_error_is_signed_and_relative_to_the_real_run():
    """110 ms for 100 ms is +10 %, 8 ms for 10 ms is −20 %, each under its metric."""
    [found] = compared([point()], [point(ttft_s=0.110, tpot_s=0.008)])["points"]

    assert found["figures"]["ttft_later_p50"] == {
        "real_s": 0.100, "predicted_s": 0.110, "error": pytest.approx(0.10),
    }  # fmt: skip
    assert found["figures"]["ttft_first_p95"]["real_s"] == 0.200
    assert found["figures"]["tpot_p95"]["error"] == pytest.approx(-0.20)
    assert (found["route"], found["later_turns"]) == ("remote", 7)


def test_errors_are_summed_up_over_points_and_held_against_their_aim():
    """+15 %, −5 % and +5 %: median 5 %, bias +5 %; two within 10 %, three within 20 %."""
    rates = (1.0, 2.0, 3.0)
    live = [point(rate=rate) for rate in rates]
    predicted = [
        point(rate=rate, ttft_s=s) for rate, s in zip(rates, (0.115, 0.095, 0.105), strict=True)
    ]
    found = compared(live, predicted)["errors"]

    assert found["ttft_later_p50"]["median"] == pytest.approx(0.05)
    assert found["ttft_later_p50"]["bias"] == pytest.approx(0.05)
    assert (found["ttft_later_p50"]["within"], found["ttft_later_p50"]["points"]) == (2, 3)
    assert found["ttft_later_p95"]["within"] == 3


@pytest.mark.parametrize(
    ("real", "predicted", "tally"),
    [
        ((0.15, 0.06), (0.14, 0.07), {"places": 1, "differ": 1, "same": 1}),
        ((0.15, 0.06), (0.05, 0.07), {"places": 1, "differ": 1, "same": 0}),
        ((0.06, 0.15), (0.07, 0.07), {"places": 1, "differ": 1, "same": 0}),
        ((0.150, 0.145), (0.05, 0.07), {"places": 1, "differ": 0, "same": 0}),
    ],
)
def test_a_winner_counts_where_the_routes_really_differ(real, predicted, tally):
    """Same sign agrees, a predicted tie does not, and within 5 % there is no winner."""
    routes = ("remote", "local")
    live = [point(policy, s) for policy, s in zip(routes, real, strict=True)]
    again = [point(policy, s) for policy, s in zip(routes, predicted, strict=True)]

    assert compared(live, again)["winners"]["ttft_later_p50"] == tally


def test_only_routes_of_one_place_are_compared():
    """Another rate, or a topology without the other route, makes no contest."""
    points = [point(rate=1.0), point("local", rate=2.0), point("roles", topology="2R")]

    assert compared(points, points)["winners"]["tpot_p50"]["places"] == 0


def test_what_did_not_vote_is_left_out_and_counted():
    """A barred point, one with errors, one never measured; few turns alone still compare."""
    rates = (1.0, 2.0, 3.0, 4.0)
    codes = (("path_unproven",), ("errors", "too_few"), ("too_few",))
    live = [point(rate=rate, validity=why) for rate, why in zip(rates, codes, strict=False)]
    pairs, left_out = matched(live, [point(rate=rate) for rate in rates])

    assert [pair.key.rate_per_s for pair in pairs] == [3.0]
    assert left_out == {"path_unproven": 1, "errors": 1, "not_measured": 1}


def test_nothing_to_compare_is_an_error():
    """It says why the points were left out."""
    with pytest.raises(NothingUsableError, match="engine_failed"):
        compared([point(validity=["engine_failed"])], [point()])


def test_a_figure_that_a_side_lacks_is_no_error():
    """A point without later turns has no TTFT of them; it is not counted, and prints a dash."""
    live = point()
    live["turn2plus"]["ttft_s"] = {"p50": None, "p95": None}
    document = compared([live], [point()])

    assert document["points"][0]["figures"]["ttft_later_p50"] is None
    assert document["errors"]["ttft_later_p50"]["points"] == 0
    assert document["errors"]["tpot_p50"]["points"] == 1
    assert "| – |" in as_markdown(document | {"grid": "g", "seed": 0})


def turn(number, ttft_s, tpot_s=0.01):
    return TurnRecord(
        "c", number, Route.LOCAL, "d0", 0.0, 0.0, first_token_at_s=ttft_s,
        finished_at_s=ttft_s + 10 * tpot_s, output_tokens=11,
    )  # fmt: skip


def test_pooled_figures_are_quantiles_of_all_turns():
    """Two points of one configuration: the median is that of their turns together."""
    points = [point(rate=1.0), point(rate=2.0), point("roles", topology="2R")]

    def real(key):
        waits = (0.1, 0.2, 0.3) if key.rate_per_s == 1 else (0.4, 0.5)
        return [turn(1, 9.0), *(turn(2, s) for s in waits)]

    def simulated(_key):
        return [turn(1, 9.0), turn(2, 0.33)]

    found = compared(points, points, real, simulated)["pooled"]

    assert list(found) == ["1P_1D remote", "2R roles", "all"]
    assert found["1P_1D remote"]["ttft_later_p50"]["real_s"] == pytest.approx(0.3)
    assert found["1P_1D remote"]["ttft_later_p50"]["error"] == pytest.approx(0.1)
    assert found["all"]["ttft_first_p50"]["error"] == 0


def test_the_table_and_the_figure_hold_every_point():
    """One row per point, with its error; one panel per kind of latency, one colour per route."""
    live = [point(), point("local", 0.06), point("roles", topology="2R")]
    document = compared(live, [point(ttft_s=0.11), point("local", 0.06), live[2]])
    text = as_markdown(document | {"grid": "g", "seed": 0})
    figure = live_figure(document["points"], {"backend": "vllm", "model": "tiny"})

    assert "| 1P_1D remote | 1 | w | 7 + 7 | 100.0 → 110.0 (+10%) |" in text
    assert "1 of 1" in text
    assert len(figure.axes) == 3
    labels = [entry.get_text() for entry in figure.axes[0].get_legend().get_texts()]
    assert labels == ["local", "remote", "replica"]
