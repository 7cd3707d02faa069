"""What is done with a finished table: gaps, differences, checks, prices, exports, plans."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from time import process_time

import numpy as np
import pytest

from ppdbench.core.errors import UsageError
from ppdbench.experiments import next_grid
from ppdbench.experiments.grid import load_grid
from ppdbench.table.compare import check, diff, flip_ratio, flip_ratios, next_to_flip
from ppdbench.table.export import export, non_cached_tokens, picks_local
from ppdbench.table.fill import fill, reweight
from ppdbench.table.lookup import Lookup
from ppdbench.table.plan import expected_loss, worths
from ppdbench.table.regret import (
    best_two,
    between,
    held_out,
    of_policy,
    regrets,
    threshold,
    two,
)
from ppdbench.table.schema import Table, counts
from ppdbench.table.score import Choice, Guard, Rule, Slo

from .tables import cell, side, table_of

RATES = (1.0, 2.0, 4.0, 8.0)
SURE = {"d_ttft": [4000] * 20, "d_tpot": [0] * 20}
TORN = {"d_ttft": [-2000, 2000] * 10, "d_tpot": [0] * 20}


def says(table):
    """(new, rate) → decision and status."""
    return {
        (c.centre["new_tokens"], c.centre["rate_per_s"]): (v.choice.value, v.status.value)
        for c, v in zip(table.cells, table.verdicts, strict=True)
    }


# --- gaps


def test_a_gap_between_neighbours_that_agree_is_filled_and_marked():
    """It takes their decision, counts as interpolated, and has no figures."""
    gappy = table_of(cell(rate=1.0), cell(rate=4.0), cell(new=128, rate=2.0))
    filled = fill(gappy)

    assert says(filled)[64, 2.0] == ("local", "interpolated")
    assert counts(filled)["interpolated"] == 1
    assert counts(filled)["local"] == 3
    added = next(c for c in filled.cells if c.filled)
    assert (added.remote, added.local, added.repeats) == (None, None, 0)


@pytest.mark.parametrize(
    "beyond",
    [
        cell(rate=4.0, gain=-0.5),
        cell(rate=4.0, replicates=TORN),
        cell(rate=0.5),
        cell(rate=4.0, remote=side(success=0.0), local=side(success=0.0)),
    ],
    ids=["disagrees", "undecided", "same side", "failed"],
)
def test_a_gap_stays_where_neighbours_do_not_agree(beyond):
    """Disagreeing, undecided, failed or one-sided neighbourhoods say nothing."""
    gappy = table_of(cell(rate=1.0), beyond, cell(new=128, rate=2.0))

    assert (64, 2.0) not in says(fill(gappy))


def test_reweighing_a_filled_table_fills_again():
    """A filled decision follows from its neighbours, so other weights may change or remove it."""
    gappy = table_of(
        cell(rate=1.0, cost=0.2), cell(rate=4.0, cost=0.05), cell(new=128, rate=2.0, cost=0.2)
    )
    strict = reweight(fill(gappy), Rule(w_tpot=20))
    torn = reweight(fill(gappy), Rule(w_tpot=5))

    assert says(strict)[64, 2.0] == ("remote", "interpolated")
    assert (64, 2.0) not in says(torn)


def test_reweighing_is_what_building_under_those_weights_gives():
    """Verdicts under a rule depend on the evidence alone."""
    cells = [cell(new=n, rate=r, cost=n / 1000) for n in (16, 64, 256) for r in RATES]

    assert reweight(table_of(*cells), Rule(w_tpot=6)).digest == table_of(*cells, w_tpot=6).digest


# --- differences and checks


def test_a_difference_says_why():
    """Other weights, other figures, or both at once."""
    first = table_of(cell(rate=1.0, cost=0.2), cell(rate=2.0), cell(rate=4.0))
    second = table_of(cell(rate=1.0, cost=0.2), cell(rate=2.0, gain=-0.5), cell(rate=8.0), w_tpot=6)
    found = diff(first, second)

    assert [(c.cell.centre["rate_per_s"], c.why) for c in found.changed] == [
        (1.0, "rule"),
        (2.0, "figures"),
    ]
    assert [c.centre["rate_per_s"] for c in found.only_first] == [4.0]
    assert [c.centre["rate_per_s"] for c in found.only_second] == [8.0]
    assert found.rule == {"w_tpot": (1.0, 6)}


def test_a_difference_may_need_both():
    """Neither the new figures nor the new weights alone change the cell."""
    found = diff(table_of(cell(cost=0.05)), table_of(cell(cost=0.2), w_tpot=6))

    assert [change.why for change in found.changed] == ["both"]


def test_a_check_names_what_a_careful_reader_should_know():
    """Simulation, thin cells, missing intervals, one-sided cells, decisions that go to and fro."""
    table = table_of(
        cell(rate=1.0, backend="sim", remote=side(0.2, n=29)),
        cell(rate=2.0, gain=-0.5),
        cell(rate=4.0),
        cell(rate=8.0, remote=side(success=0.1)),
    )
    told = check(table)

    text = "\n".join(told.sentences)
    for part in (
        "simulator",
        "1 cells rest on fewer",
        "3 cells have no interval",
        "1 cells are one",
    ):
        assert part in text
    where = "context_tokens=1024, new_tokens=64, output_tokens=128"
    assert told.flips == [f"2P_2D along rate_per_s at {where}: local remote local local"]


def test_the_weight_at_which_a_cell_flips():
    """r* is Δ_ttft/Δ_tpot; a cell that costs no TPOT never flips."""
    costly, free = table_of(cell(gain=0.5, cost=0.1)).verdicts + table_of(cell()).verdicts

    assert flip_ratio(costly) == pytest.approx(5.0)
    assert flip_ratio(free) is None


def test_only_cells_that_are_local_now_are_said_to_turn_remote():
    """Those that turned already and those that the guard vetoed are remote; limits know no r*."""
    early, late = cell(rate=1.0, gain=0.5, cost=0.1), cell(rate=2.0, gain=0.5, cost=0.05)
    turned = cell(rate=4.0, gain=0.1, cost=0.5)

    assert next_to_flip(table_of(early, late, turned)) == [
        (pytest.approx(5.0), 0), (pytest.approx(10.0), 1)
    ]  # fmt: skip
    vetoed = table_of(early, late, turned, guard=Guard("p99", limit_ratio=1.07))
    assert [index for _, index in next_to_flip(vetoed)] == [1]
    kept = {name: replace(getattr(early, name), meets_slo=0.5) for name in ("remote", "local")}
    limits = table_of(replace(early, **kept), slo=Slo(0.2, 0.03))
    assert (flip_ratios(limits), next_to_flip(limits)) == ([None], [])


# --- prices


def priced(table):
    return {regret.policy: regret for regret in regrets(table)}


def split_table():
    """Local gains up to 256 new tokens and loses above; replicas beat both everywhere."""
    return table_of(
        *(
            cell(new=n, rate=r, gain=0.5 if n <= 256 else -0.4, replica=side(0.02, 0.01),
                 replica_topology="4R")
            for n in (16, 64, 256, 1024) for r in RATES
        )
    )  # fmt: skip


def test_the_price_of_a_simple_policy_is_what_it_loses_against_the_table():
    """Mean and worst S; a threshold that splits as the table does loses nothing."""
    found = priced(split_table())

    assert found["best_threshold"].setting == {"max_new_tokens": 256}
    assert found["best_threshold"].mean_s_lost == 0
    assert found["always_local"].mean_s_lost == pytest.approx(0.4 / 4)
    assert found["always_local"].worst_s_lost == pytest.approx(0.4)
    assert found["always_remote"].mean_s_lost == pytest.approx(0.5 * 3 / 4)
    assert found["always_remote"].agree == 0.25
    assert found["threshold_512"].mean_s_lost == 0


def test_replicas_that_beat_both_routes_have_a_negative_price():
    """The tool must be able to answer "use replicas"."""
    found = priced(split_table())

    assert found["sticky_4R"].mean_s_lost == pytest.approx((0.5 * 3) / 4 - 0.9)
    assert found["sticky_4R"].agree is None
    assert "sticky_4R" not in priced(table_of(cell()))


def noisy_tables(*seeds):
    """Per seed the same cells, whose true S is 0, measured with noise: there is nothing to gain."""
    for seed in seeds:
        gains = np.random.default_rng(seed).normal(0, 0.1, 200)
        runs = [{"backend": "vllm", "digest": f"sha256:{seed}"}]
        cells = (cell(new=16 + n, gain=g) for n, g in enumerate(gains.tolist()))
        yield table_of(*cells, provenance={"backend": "vllm", "runs": runs})


def test_noise_is_worth_something_in_sample_and_nothing_held_out():
    """A table that chose by noise must not be praised by the same noise."""
    first, second = noisy_tables(1, 2)
    fresh = {regret.policy: regret for regret in held_out(first, second)}

    assert priced(first)["always_remote"].mean_s_lost > 0.03
    assert abs(fresh["always_remote"].mean_s_lost) < 0.015
    assert fresh["table_refit"].mean_s_lost < -0.03
    assert fresh["best_threshold"].setting == priced(first)["best_threshold"].setting


def test_held_out_figures_come_from_other_runs_under_the_same_rule():
    """Anything else would be in-sample again, or another S."""
    first, second = noisy_tables(1, 2)

    with pytest.raises(UsageError, match="same run"):
        held_out(first, first)
    with pytest.raises(UsageError, match="weights"):
        held_out(first, reweight(second, Rule(w_tpot=2.0)))


def test_picking_a_route_that_failed_is_counted_not_scored():
    """S does not exist in a one-sided cell."""
    table = table_of(cell(rate=1.0), cell(rate=2.0, remote=side(success=0.0)))
    found = priced(table)

    assert (found["always_remote"].infeasible, found["always_local"].infeasible) == (1, 0)
    assert found["always_remote"].cells == 1


def test_dynamos_two_limits_are_both_strict():
    """2,048 effective tokens and a share of 0.7 are already remote."""
    edge = table_of(cell(new=2048, context=100_000), cell(new=700, context=300))
    inside = table_of(cell(new=2047, context=100_000), cell(new=699, context=300))

    assert of_policy(edge, "x", two(2048, 0.7)).agree == 0
    assert of_policy(inside, "x", two(2048, 0.7)).agree == 1
    assert of_policy(edge, "x", threshold(700)).agree == 0.5


def test_limits_between_values_split_them_in_every_way():
    """Below all, between each two, above all."""
    limits = between({1.0, 4.0, 16.0})

    assert [sum(v < limit for v in (1, 4, 16)) for limit in limits] == [0, 1, 2, 3]


def best_two_by_trying(table):
    """Every pair asked of every cell: cubic, and plainly what the best pair means."""
    new = between({c.centre["new_tokens"] for c in table.cells})
    ratios = between(
        {c.centre["new_tokens"] / (c.centre["context_tokens"] + c.centre["new_tokens"])
         for c in table.cells}
    )  # fmt: skip
    tried = [
        of_policy(table, "best_dynamo", two(n, r), None,
                  eff_isl_threshold=n, eff_isl_ratio_threshold=r)
        for n in new for r in [*ratios[:-1], 1.0]
    ]  # fmt: skip
    return min(reversed(tried), key=lambda regret: regret.mean_with_failures)


def scattered_table(seed, count, **rule):
    """Cells of random places and figures, some of them with a route that failed."""
    rng = np.random.default_rng(seed)
    failed = [{"remote": side(success=0.0)}, {"local": side(success=0.0)}, *[{}] * 8]
    return table_of(
        *(
            cell(new=int(rng.integers(1, 40)), context=int(rng.integers(1, 400)), rate=float(n + 1),
                 gain=float(rng.normal(0, 0.5)), **failed[rng.integers(10)])
            for n in range(count)
        ),
        **rule,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_the_best_pair_is_the_one_that_trying_all_finds(seed):
    """Limits and price, over random tables, with failed routes that count as lost TTFT weight."""
    table = scattered_table(seed, 1 + 2 * seed, w_ttft=0.25 + seed)

    assert best_two(table) == best_two_by_trying(table)


def test_the_best_pair_of_many_cells_is_found_at_once():
    """Work grows with pairs of limits, not with pairs times cells."""
    table = scattered_table(7, 400)
    _ = table.verdicts
    began = process_time()
    best_two(table)

    assert process_time() - began < 0.5


# --- exports


def test_llm_d_gets_a_strict_limit_between_the_measured_values():
    """Below ``nonCachedTokens`` is local there; 0 would mean always local, 1 is always remote."""
    table = split_table()

    assert non_cached_tokens(table, 256) == 512
    assert non_cached_tokens(table, 1024) == 1025
    assert non_cached_tokens(table, 0) == 1
    assert "    nonCachedTokens: 512\n" in export(table, "llm-d").text


def test_dynamo_gets_its_own_json():
    """The keys and the policy name that its router reads."""
    made = export(split_table(), "dynamo")

    config = json.loads(made.text)
    assert config["policy"] == "isl_bounding"
    is_local = two(config["eff_isl_threshold"], config["eff_isl_ratio_threshold"])
    assert of_policy(split_table(), "x", is_local).agree == 1
    assert made.regret.mean_s_lost == 0


def test_vllm_router_gets_cells_that_decide_as_the_table_does():
    """Its loader's rules hold (checked at export); at each centre it decides as the table."""
    table = split_table()
    made = export(table, "vllm-router")

    document = json.loads(made.text)
    assert document["metric"] == "ttft_seconds"
    assert {c["path"] for c in document["cells"]} == {"cold_remote", "local_append"}
    for one in table.cells:
        assert picks_local(document, one) == (one.centre["new_tokens"] <= 256)
    assert made.regret.mean_s_lost == 0
    assert made.regret.cells == 4


def test_an_export_says_where_its_figures_come_from():
    """A simulated table stays recognisable in the file that leaves this tool."""
    simulated = table_of(cell(backend="sim"))

    assert "SIMULATED" in export(simulated, "llm-d").text
    assert simulated.digest in export(simulated, "llm-d").text


def test_an_unknown_router_or_a_table_of_two_shapes_is_refused():
    """The message lists what there is."""
    with pytest.raises(UsageError, match="vllm-router, dynamo, llm-d"):
        export(table_of(cell()), "envoy")
    with pytest.raises(UsageError, match="one --base"):
        export(table_of(cell(), cell(topology="1P_3D")), "dynamo")


# --- the next measurement


def test_a_close_call_is_worth_more_than_a_clear_one():
    """The expected loss falls with the margin and grows with the spread."""
    assert expected_loss(0.0, 0.1) == pytest.approx(0.1 * 0.3989, abs=1e-4)
    assert expected_loss(0.0, 0.1) > expected_loss(0.1, 0.1) > expected_loss(0.3, 0.1) > 0
    assert expected_loss(0.1, 0.2) > expected_loss(0.1, 0.1)
    assert expected_loss(0.1, 0.0) == 0


def test_places_are_ranked_by_what_a_wrong_decision_would_cost():
    """Torn cells first, filled ones among them, clear ones last, failed ones never."""
    table = fill(
        table_of(
            cell(new=16, rate=2.0, replicates=SURE),
            cell(new=64, rate=1.0, replicates=TORN, gain=0.01),
            cell(new=256, rate=1.0, replicates=SURE),
            cell(new=256, rate=4.0, replicates=SURE),
            cell(new=1024, rate=1.0, remote=side(success=0.0)),
        )
    )
    ranked = [(place.workload, place.rate_per_s) for place in worths(table, "2P_2D")]

    assert set(ranked[:2]) == {("w64", 1.0), ("w256", 2.0)}
    assert ("w1024", 1.0) not in ranked


def test_traffic_moves_the_ranking():
    """A cell that no conversation looks up is worth nothing."""
    table = table_of(cell(new=16, replicates=TORN), cell(new=64, replicates=TORN))
    place = worths(table, "2P_2D", {1: 10.0})[0]

    assert (place.workload, worths(table, "2P_2D", {1: 10.0})[1].value) == ("w64", 0.0)


def smoke_table():
    shapes = {"small_mid_bal": (256, 128, 128), "large_tiny": (2048, 16, 32)}
    return table_of(
        *(
            replace(
                cell(context=shape[0], new=shape[1], output=shape[2], rate=rate,
                     replicates=TORN if rate == 8.0 else SURE),
                workload=name,
            )
            for name, shape in shapes.items() for rate in (2.0, 8.0)
        )
    )  # fmt: skip


def test_the_plan_is_a_grid_that_loads_and_pools_with_the_first():
    """Only the chosen places, both routes, enough repeats, the same workload digests."""
    smoke = load_grid("smoke")
    chosen = next_grid.affordable(worths(smoke_table(), "2P_2D"), smoke, 1800)
    text = next_grid.grid_text("smoke", "2P_2D", chosen, 3)

    assert {(p.workload, p.rate_per_s) for p in chosen} == {
        ("small_mid_bal", 8.0),
        ("large_tiny", 8.0),
    }
    assert tomllib.loads(text)["keep_records"] is True


def test_a_written_plan_loads_as_a_grid(tmp_path):
    """What ppd table plan writes, ppd sweep takes."""
    smoke = load_grid("smoke")
    chosen = next_grid.affordable(worths(smoke_table(), "2P_2D"), smoke, 120)
    (tmp_path / "next.toml").write_text(next_grid.grid_text("smoke", "2P_2D", chosen, 3))

    grid = load_grid(str(tmp_path / "next.toml"))

    assert len(chosen) == 1
    assert {(k.policy, k.workload, k.rate_per_s, k.repeat) for k in grid.points()} == {
        (policy, chosen[0].workload, 8.0, repeat)
        for policy in ("remote", "local")
        for repeat in range(3)
    }
    name = chosen[0].workload
    assert grid.workload_digest(name) == smoke.workload_digest(name)


def test_a_budget_below_one_place_is_refused():
    """The message says what one place takes."""
    with pytest.raises(UsageError, match="one place takes 120 s"):
        next_grid.affordable(worths(smoke_table(), "2P_2D"), load_grid("smoke"), 60)


def test_traffic_counts_the_later_turns_of_a_grids_conversations():
    """Every later turn of the grid looks up one cell."""
    table, smoke = smoke_table(), load_grid("smoke")
    traffic = next_grid.traffic_of(smoke, Lookup(table))
    turns = traffic.turns

    assert (traffic.grid, traffic.too_far) == ("smoke", 0)
    assert traffic.later_turns == sum(turns.values())
    assert set(turns) == set(range(4))
    by_rate = {rate: sum(n for i, n in turns.items() if table.cells[i].centre["rate_per_s"] == rate)
               for rate in (2.0, 8.0)}  # fmt: skip
    assert by_rate[8.0] > 2 * by_rate[2.0]


def test_traffic_beyond_the_tables_distance_is_counted_or_refused():
    """Turns without a cell weigh nothing; a grid that has only such turns is no traffic."""
    smoke = load_grid("smoke")
    near = smoke_table()
    far = table_of(*(replace(c, centre={**c.centre, "new_tokens": 1e6}) for c in near.cells[:1]),
                   max_distance=1.0)  # fmt: skip
    split = Table(replace(near.rule, max_distance=0.01), near.provenance, near.cells[:1])

    with pytest.raises(UsageError, match="farther from every cell"):
        next_grid.traffic_of(smoke, Lookup(far))
    traffic = next_grid.traffic_of(smoke, Lookup(split))
    assert 0 < traffic.too_far == traffic.outside < traffic.later_turns


def test_traffic_that_meets_no_cell_is_not_equal_traffic():
    """No turns weigh nothing; they do not make every cell weigh the same."""
    found = worths(table_of(cell(replicates=TORN)), "2P_2D", {5: 1.0})

    assert [place.value for place in found] == [0.0]
    with pytest.raises(UsageError, match="nothing is worth measuring"):
        next_grid.affordable(found, load_grid("smoke"), 1800)


def test_values_that_toml_can_hold_come_back():
    """The writer and the standard reader are inverse on what grids contain."""
    document = {
        "title": 'with "quotes" and ü', "rates_per_s": [0.5, 2], "keep_records": True,
        "think": {"kind": "fixed", "mean_s": 1.5},
        "workload": [{"name": "a", "turns": [[1, 2]]}, {"name": "b", "draw": {"turns": 2}}],
    }  # fmt: skip

    assert tomllib.loads(next_grid.toml(document)) == document


def test_a_choice_has_two_sides():
    """Undecided is no route a table may fall back to."""
    with pytest.raises(UsageError):
        Rule(undecided=Choice.UNDECIDED)
