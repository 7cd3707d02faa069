"""Look-up: exact nearest cell, own centre, edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdbench.core.decision import Features, Route
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Role
from ppdbench.policy.table import TablePolicy
from ppdbench.table.lookup import Lookup
from ppdbench.table.schema import AXES, Cell, Table
from ppdbench.table.score import STATISTICS, Choice, Rule, Side

tokens = st.integers(1, 100_000)
rates = st.floats(0.05, 100, allow_nan=False)
centres = st.tuples(tokens, tokens, tokens, rates)


def side(ttft_s=0.1, tpot_s=0.01, success=1.0):
    stats = {**dict.fromkeys(STATISTICS), "mean": ttft_s}
    return Side(50, success, stats, {**stats, "mean": tpot_s}, {**stats, "mean": tpot_s})


def cell(centre, remote=None, local=None, topology="2P_2D"):
    return Cell(
        topology=topology,
        workload="w",
        backend="sim",
        centre=dict(zip(AXES, centre, strict=True)),
        remote=remote or side(0.2),
        local=local or side(0.1),
    )


def table_of(cells, **rule):
    return Table(Rule(**rule), {}, tuple(cells))


def features(point):
    return Features(2, *point)


def octaves(point, centre):
    return math.dist([math.log2(v) for v in point], [math.log2(v) for v in centre])


@given(st.lists(centres, min_size=1, max_size=25, unique=True), st.data())
def test_the_nearest_cell_is_found_exactly(points, data):
    """Inside the measured range the precomputed map agrees with measuring every distance."""
    table = table_of(map(cell, points))
    low, high = ([f(p[k] for p in points) for k in range(4)] for f in (min, max))
    asked = tuple(
        data.draw(st.floats(a, b) if k == 3 else st.integers(a, b))
        for k, (a, b) in enumerate(zip(low, high, strict=True))
    )

    chosen = table.cells[Lookup(table).decide(features(asked)).cell]

    nearest = min(octaves(asked, tuple(c.centre.values())) for c in table.cells)
    assert octaves(asked, tuple(chosen.centre.values())) == pytest.approx(nearest, abs=1e-6)


@given(st.lists(centres, min_size=1, max_size=25, unique=True))
def test_a_centre_is_its_own_cell(points):
    """Every cell's own centre classifies to itself, and never counts as extrapolated."""
    table = table_of(map(cell, points))
    lookup = Lookup(table)

    for index, each in enumerate(table.cells):
        decision = lookup.decide(features(tuple(each.centre.values())))
        assert (decision.cell, decision.reason) == (index, "table")


CENTRE = (1024, 128, 128, 4.0)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("factor", [0.49, 2.01, 0])
def test_outside_the_range_is_said(axis, factor):
    """Beyond what was measured the nearest cell still answers, with ``extrapolated``."""
    table = table_of([cell((512, 64, 64, 2.0)), cell((2048, 256, 256, 8.0))])
    edge = (512, 64, 64, 2.0) if factor < 1 else (2048, 256, 256, 8.0)
    asked = tuple(v * factor if k == axis else v for k, v in enumerate(edge))

    decision = Lookup(table).decide(features(asked))

    assert decision.reason == "table,extrapolated"
    assert decision.route is Route.LOCAL


def test_far_outside_the_default_holds():
    """Beyond the stated distance a table says that it does not know."""
    lookup = Lookup(table_of([cell(CENTRE)], max_distance=2.0))

    near = lookup.decide(features((1024 * 4, 128, 128, 4.0)))
    far = lookup.decide(features((1024 * 4 + 1, 128, 128, 4.0)))

    assert (near.route, near.reason) == (Route.LOCAL, "table,extrapolated")
    assert (far.route, far.reason) == (Route.REMOTE, "table,extrapolated,too_far")
    assert far.cell is None


def test_a_cell_says_how_it_decided():
    """One-sided and failed cells carry their status in the reason; failed ones take the default."""
    dead = side(success=0.0)
    table = table_of(
        [cell(CENTRE, remote=dead), cell((1024, 256, 128, 4.0), remote=dead, local=dead)],
        undecided=Choice.REMOTE,
    )
    lookup = Lookup(table)

    one_sided = lookup.decide(features(CENTRE))
    failed = lookup.decide(features((1024, 256, 128, 4.0)))

    assert (one_sided.route, one_sided.reason) == (Route.LOCAL, "table,one_sided")
    assert (failed.route, failed.reason) == (Route.REMOTE, "table,failed")


def test_a_table_of_several_topologies_asks_for_the_clusters():
    """A cluster gets the part that was measured on its shape, or on the shape it is the twin of."""
    other = cell(CENTRE, remote=side(0.1), local=side(0.2), topology="1P_3D")
    table = table_of([cell(CENTRE), other])

    for cluster, route in (("2P_2pD", Route.LOCAL), ("1P_3D", Route.REMOTE)):
        policy = TablePolicy(table, "table:t", cluster)
        assert policy.decide(features(CENTRE), Role.D).route is route
    with pytest.raises(UsageError, match="4R"):
        TablePolicy(table, "table:t", "4R")
