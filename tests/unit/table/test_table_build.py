"""From turns to cells: pairing, bins, intervals, and what may be pooled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ppdbench.core.decision import Route
from ppdbench.core.errors import NothingUsableError, RunError, TableError, UsageError
from ppdbench.runs.manifest import EngineIdentity, Manifest
from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.table.build import build_table
from ppdbench.table.inputs import RunInput
from ppdbench.table.schema import canonical, counts, to_document
from ppdbench.table.score import STATISTICS, Guard, Rule, Slo

GROUP = {
    "context_tokens": {"mean": 256}, "new_tokens": {"mean": 64}, "output_tokens": {"mean": 32},
}  # fmt: skip


def stats(mean):
    return dict.fromkeys(STATISTICS, mean)


def point(policy, ttft_s, *, topology="2P_2D", workload="w", rate=2.0, repeat=0, n=40, **changes):
    group = {"n": n, "ttft_s": stats(ttft_s), "tpot_s": stats(0.01), **GROUP}
    return {
        "topology": topology, "policy": policy, "workload": workload, "rate_per_s": rate,
        "repeat": repeat, "success": 1.0, "validity": [], "turn2plus": group, "all": group,
        **changes,
    }  # fmt: skip


def run(points, records=None, name="run", **identity):
    engine = EngineIdentity(**{"backend": "sim", "engine": "simulator", "model": "m", **identity})
    kept = records or {}
    return RunInput(
        name=name,
        digest=f"sha256:{name}",
        manifest=Manifest(engine),
        points=points,
        records=lambda key: kept.get((key.policy, key.repeat), []),
    )


def turns(route, ttft_s, lengths, conversations=40, seed=0):
    """Two later turns per conversation; TTFT scatters around ``ttft_s`` by conversation."""
    rng = np.random.default_rng(seed)
    records = []
    for number in range(conversations):
        slow = 1 + 0.2 * rng.standard_normal()
        for turn in (1, 2, 3):
            context, new, output = lengths(number, turn)
            record = TurnRecord(f"c{number}", turn, route, "d0", 0.0, 0.0)
            record.first_token_at_s = ttft_s * slow
            record.finished_at_s = ttft_s * slow + 0.01 * (output - 1)
            record.output_tokens = record.wanted_output_tokens = output
            record.context_tokens, record.new_tokens = context, new
            records.append(record)
    return records


def same(number, turn):
    return 256, 64, 32


def build(runs, **rule):
    return build_table(runs if isinstance(runs, list) else [runs], ["2P_2D"], Rule(**rule))


def test_one_repeat_without_records_has_no_interval():
    """The sign decides and the interval is null."""
    table = build(run([point("remote", 0.2), point("local", 0.1)])).table

    assert table.verdicts[0].s_ci is None
    assert table.verdicts[0].choice == "local"


@pytest.mark.parametrize(
    ("gains", "choice"), [((0.1, 0.12, 0.11), "local"), ((0.1, 0.3, 0.19), "undecided")]
)
def test_repeats_give_an_interval(gains, choice):
    """Repeats that disagree on the sign leave the cell undecided."""
    points = [
        point(policy, ttft, repeat=k)
        for k, gain in enumerate(gains)
        for policy, ttft in (("remote", 0.2), ("local", gain))
    ]
    table = build(run(points)).table

    assert table.verdicts[0].choice == choice
    assert table.cells[0].repeats == 3


def test_paired_turns_see_through_what_both_sides_share():
    """A small gain is sure when conversations differ far more than the routes do."""
    records = {
        ("remote", 0): turns(Route.REMOTE, 0.200, same),
        ("local", 0): turns(Route.LOCAL, 0.196, same),
    }
    table = build(run([point("remote", 0.2), point("local", 0.196)], records)).table

    low, high = table.verdicts[0].s_ci
    assert low == pytest.approx(0.02, abs=2e-4)
    assert high == pytest.approx(0.02, abs=2e-4)


def test_unrelated_scatter_leaves_a_small_gain_undecided():
    """The same gain is lost when the two sides scatter on their own."""
    records = {
        ("remote", 0): turns(Route.REMOTE, 0.200, same, seed=1),
        ("local", 0): turns(Route.LOCAL, 0.199, same, seed=2),
    }
    table = build(run([point("remote", 0.2), point("local", 0.199)], records)).table

    assert table.verdicts[0].choice == "undecided"


def test_a_turn_counts_only_where_both_sides_have_it():
    """A turn that failed on one side leaves the pair; success still remembers it."""
    remote, local = turns(Route.REMOTE, 0.2, same), turns(Route.LOCAL, 0.1, same)
    for record in remote[:9]:
        record.outcome = Outcome.TIMEOUT
    records = {("remote", 0): remote, ("local", 0): local}
    table = build(run([point("remote", 0.2, success=0.96), point("local", 0.1)], records)).table

    assert (table.cells[0].remote.n, table.cells[0].local.n) == (74, 74)
    assert table.cells[0].remote.success == 0.96


def test_turns_that_a_replica_served_are_no_evidence():
    """In a hybrid, an R serves its conversations under every policy."""
    remote, local = turns(Route.REMOTE, 0.2, same), turns(Route.LOCAL, 0.1, same)
    for record in [*remote[:60], *local[:60]]:
        record.route = Route.REPLICA
    records = {("remote", 0): remote, ("local", 0): local}
    table = build(run([point("remote", 0.2), point("local", 0.1)], records)).table

    assert table.cells[0].remote.n == 40


def test_few_shapes_are_cells_as_they_are():
    """A synthetic workload of three turns has one cell per turn shape."""
    records = {
        (policy, 0): turns(route, ttft, lambda _, turn: (256 * turn, 64, 32))
        for policy, route, ttft in (("remote", Route.REMOTE, 0.2), ("local", Route.LOCAL, 0.1))
    }
    table = build(run([point("remote", 0.2), point("local", 0.1)], records)).table

    assert [cell.centre["context_tokens"] for cell in table.cells] == [512, 768]
    assert [cell.spread for cell in table.cells] == [None, None]


def real(number, turn):
    rng = np.random.default_rng((number, turn))
    context, new, output = np.exp(rng.normal((6, 4, 5), 0.8)).astype(int) + 1
    return int(context), int(new), int(output)


def test_real_conversations_become_quantile_bins_with_their_spread():
    """Many shapes make bins by context and new tokens, the same at each rate; no turn is lost."""
    points, records = [], {}
    for policy, route, ttft in (("remote", Route.REMOTE, 0.2), ("local", Route.LOCAL, 0.1)):
        points += [point(policy, ttft, rate=rate) for rate in (2.0, 4.0)]
        records[policy, 0] = turns(route, ttft, real, conversations=200)
    table = build(run(points, records)).table

    assert len(table.cells) == 2 * 9
    for rate in (2.0, 4.0):
        row = [cell for cell in table.cells if cell.centre["rate_per_s"] == rate]
        assert sum(cell.local.n for cell in row) == 400
        assert all(30 <= cell.local.n <= 60 for cell in row)
    for cell in table.cells:
        for axis, (low, high) in cell.spread.items():
            assert low <= cell.centre[axis] <= high


def test_limits_count_failed_turns_as_missed():
    """Under --slo a turn that failed is one that did not meet them."""
    remote, local = turns(Route.REMOTE, 0.2, same), turns(Route.LOCAL, 0.1, same)
    for record in local[:60]:
        record.outcome = Outcome.TIMEOUT
    records = {("remote", 0): remote, ("local", 0): local}
    table = build(
        run([point("remote", 0.2), point("local", 0.1)], records), slo=Slo(1.0, 0.03)
    ).table

    assert table.cells[0].remote.meets_slo == 1.0
    assert table.cells[0].local.meets_slo == 0.5
    assert table.verdicts[0].choice == "remote"


def test_points_that_may_never_vote_do_not():
    """An invalid side leaves the place unpaired; it is counted, not hidden."""
    points = [
        point("remote", 0.2), point("local", 0.1),
        point("remote", 0.2, rate=4.0), point("local", 0.1, rate=4.0, validity=["path_unproven"]),
    ]  # fmt: skip
    built = build(run(points))

    assert counts(built.table)["cells"] == 1
    assert built.unpaired == [("w", 4.0)]
    assert built.barred == {"path_unproven": 1}
    with pytest.raises(NothingUsableError, match=r"1 places have one side only.*1 path_unproven"):
        build(run(points[2:]))


def test_thin_places_are_left_out_and_counted():
    """A working side below --min-n makes no cell."""
    points = [point("remote", 0.2, n=4), point("local", 0.1), point("remote", 0.2, rate=4.0),
              point("local", 0.1, rate=4.0)]  # fmt: skip
    built = build(run(points), min_n=5)

    assert built.thin == [("w", 2.0)]
    assert counts(built.table)["cells"] == 1


def test_of_two_workloads_at_one_place_the_better_sampled_one_stays():
    """A centre may stand once in a table; what is left out is said."""
    points = [
        point(policy, ttft, workload=name, n=n)
        for name, n, gain in (("few", 10, 0.3), ("many", 40, 0.1))
        for policy, ttft in (("remote", 0.2), ("local", gain))
    ]
    built = build(run(points))

    assert [cell.workload for cell in built.table.cells] == ["many"]
    assert [cell.workload for cell in built.doubled] == ["few"]
    assert built.table.verdicts[0].choice == "local"


def test_a_statistic_that_a_run_does_not_know_is_refused():
    """Unknown figures would give S = 0 in every cell, which reads like an answer."""
    points = [point("remote", 0.2), point("local", 0.1)]
    for each in points:
        each["turn2plus"]["ttft_s"]["p90"] = None

    assert build(run(points), stat="p99").table.verdicts[0].choice == "local"
    with pytest.raises(UsageError, match="known there: mean, p50, p95, p99"):
        build(run(points), stat="p90")


def test_the_twin_is_the_local_side():
    """BASE under roles against its twin under roles is the same comparison."""
    points = [point("roles", 0.2), point("roles", 0.1, topology="2P_2pD"), point("roles", 0.05, topology="4R")]  # fmt: skip  # noqa: E501
    table = build(run(points)).table

    assert table.verdicts[0].d_ttft == pytest.approx(0.5)
    assert table.cells[0].replica_topology == "4R"
    assert table.cells[0].replica.ttft_s["mean"] == 0.05


def live_and_simulated():
    simulated = [
        point(p, t, rate=r) for r in (2.0, 4.0) for p, t in (("remote", 0.2), ("local", 0.1))
    ]
    live = [point("remote", 0.1), point("local", 0.2), point("remote", 0.1, rate=4.0)]
    return [
        run(simulated, name="sim"),
        run(live, name="live", backend="vllm", engine="vllm", engine_version="0.21"),
    ]


def test_live_cells_win_over_simulated_ones_place_by_place():
    """Where a live run has both sides its cell stands; elsewhere the simulated one does."""
    table = build(live_and_simulated()).table

    assert [(c.centre["rate_per_s"], c.backend) for c in table.cells] == [
        (2.0, "vllm"),
        (4.0, "sim"),
    ]
    assert [v.choice for v in table.verdicts] == ["remote", "local"]
    assert table.simulated
    assert table.provenance["backend"] == "sim+vllm"
    assert table.provenance["engine_version"] == "0.21"


def test_the_order_of_runs_changes_no_byte():
    """Same inputs, same bytes."""
    runs = live_and_simulated()

    assert canonical(to_document(build(runs).table)) == canonical(
        to_document(build(runs[::-1]).table)
    )


@pytest.mark.parametrize("field", ["model", "dtype", "gpu", "connector", "block_size"])
def test_runs_that_differ_may_not_be_pooled(field):
    """The refusal names the field and both values."""
    both = [point("remote", 0.2), point("local", 0.1)]
    runs = [run(both, name="a"), run(both, name="b", **{field: 7})]

    with pytest.raises(RunError, match=f"a and b do not mix: {field} is .* 7 "):
        build(runs)


def test_two_live_runs_must_agree_beside_a_simulated_one():
    """What a simulated run may differ in is no excuse for two engines of other versions."""
    both = [point("remote", 0.2), point("local", 0.1)]
    live = {"backend": "vllm", "engine": "vllm"}
    runs = [
        run(both, name="a", engine_version="0.20", **live),
        run(both, name="b", engine_version="0.21", **live),
        run(both, name="sim"),
    ]

    with pytest.raises(RunError, match="a and b do not mix: engine_version"):
        build(runs)


def test_every_pair_of_runs_must_agree_on_the_workloads_that_they_share():
    """A first run without the workload hides no difference between the others."""
    both = [point("remote", 0.2), point("local", 0.1)]
    digests = {"a": {"other": "0"}, "b": {"w": "1"}, "c": {"w": "2"}}
    runs = [
        replace(r, manifest=replace(r.manifest, workload_digests=digests[r.name]))
        for r in (run(both, name=name) for name in digests)
    ]

    with pytest.raises(RunError, match=r"b and c do not mix: workload_digests\.w"):
        build(runs)


def test_a_live_cell_stays_before_a_simulated_one_at_its_place():
    """Also when the simulated one comes from another workload and has more turns."""
    live, simulated = (
        [point("remote", 0.2, workload=name, n=n), point("local", ttft, workload=name, n=n)]
        for name, n, ttft in (("short", 10, 0.3), ("long", 900, 0.1))
    )
    built = build(
        [run(simulated, name="sim"), run(live, name="live", backend="vllm", engine="vllm")]
    )

    assert [cell.backend for cell in built.table.cells] == ["vllm"]
    assert [cell.backend for cell in built.doubled] == ["sim"]


def test_a_base_given_twice_is_refused():
    """Every cell would stand twice, and the second ones be reported as left out."""
    both = [point("remote", 0.2), point("local", 0.1)]

    with pytest.raises(UsageError, match="--base 2P_2D is given twice"):
        build_table([run(both)], ["2P_2D", "2P_2D"], Rule())


def test_a_guard_on_a_figure_that_a_run_does_not_know_is_refused():
    """It would let every cell pass as if it had looked."""
    points = [point("remote", 0.2), point("local", 0.1)]
    for each in points:
        each["all"]["tpot_s"]["p95"] = None

    assert build(run(points), guard=Guard("p99", 0.001)).table.verdicts[0].vetoed
    with pytest.raises(
        UsageError, match=r"--guard tpot_p95: w .* known there: mean, p50, p90, p99"
    ):
        build(run(points), guard=Guard("p95", 0.001))


def test_a_live_gpu_is_the_simulated_one_under_its_drivers_name():
    """A simulated run names its GPU by the operator database, a live one as the driver does."""
    both = [point("remote", 0.2), point("local", 0.1)]
    live = {"backend": "vllm", "engine": "vllm", "engine_version": "0.21"}
    simulated = run(both, name="sim", gpu="h100_sxm")

    table = build([simulated, run(both, name="live", gpu="NVIDIA H100 80GB HBM3", **live)]).table
    assert [cell.backend for cell in table.cells] == ["vllm"]
    with pytest.raises(RunError, match="gpu"):
        build([simulated, run(both, name="live", gpu="NVIDIA H100 PCIe", **live)])


def test_runs_of_other_workloads_under_one_name_may_not_be_pooled():
    """The workload's digest must agree, too."""
    both = [point("remote", 0.2), point("local", 0.1)]
    runs = [
        replace(r, manifest=replace(r.manifest, workload_digests={"w": r.name}))
        for r in (run(both, name="a"), run(both, name="b"))
    ]

    with pytest.raises(RunError, match=r"workload_digests\.w"):
        build(runs)


def test_a_run_given_twice_is_refused():
    """Its points would count double."""
    both = [point("remote", 0.2), point("local", 0.1)]

    with pytest.raises(TableError, match="give it once"):
        build([run(both), run(both)])


def test_a_base_without_p_and_d_is_refused():
    """Replicas have nothing to compare; they enter beside a base."""
    with pytest.raises(UsageError, match="4R"):
        build_table([run([point("roles", 0.1, topology="4R")])], ["4R"], Rule())


def nowhere(policy, workload="single", **changes):
    """A point whose conversations never came to a later turn: its lengths are unknown."""
    empty = {name: stats(None) for name in ("ttft_s", "tpot_s", *GROUP)}
    group = {"n": 0, **empty}
    return point(policy, 0.1, workload=workload, turn2plus=group, **changes)


def test_a_place_without_later_turns_is_left_out():
    """One-turn conversations, or later turns that failed everywhere, have no place in a table."""
    there = [point("remote", 0.3), point("local", 0.1)]
    built = build(run([*there, nowhere("remote"), nowhere("local", success=0.5)]))
    assert [cell.workload for cell in built.table.cells] == ["w"]
    assert built.thin == [("single", 2.0)]


def test_runs_without_any_later_turn_make_no_table():
    with pytest.raises(NothingUsableError, match="1 have too few samples"):
        build(run([nowhere("remote"), nowhere("local")]))
