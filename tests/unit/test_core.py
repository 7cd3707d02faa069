"""Topologies, seeds and the rules no policy may change."""

from __future__ import annotations

import pytest

from ppdbench.core.decision import Features, Route
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import NAMED_TOPOLOGIES, Role, Topology
from ppdbench.policy.parse import parse_policy
from ppdbench.policy.placement import Placement
from ppdbench.policy.rules import decide


@pytest.mark.parametrize("name", NAMED_TOPOLOGIES)
def test_a_topology_is_its_name(name):
    """Parsing and printing are inverse, and every named shape has four nodes."""
    topology = Topology.parse(name)

    assert str(topology) == name
    assert len(topology.nodes) == 4


@pytest.mark.parametrize("name", ["", "0R", "2P", "1D", "P_D", "1P_1X", "1P_1P_1D", "1p_1d"])
def test_a_wrong_topology_is_refused_with_its_name(name):
    """P goes with D or pD, roles stand once, and the message shows what was asked."""
    with pytest.raises(UsageError, match="topology"):
        Topology.parse(name)


@pytest.mark.parametrize(
    ("base", "twin"), [("2P_2D", "2P_2pD"), ("1P_1D_2pD", "1P_3pD"), ("1R_1P_2D", "1R_1P_2pD")]
)
def test_the_twin_has_every_d_a_pd(base, twin):
    """The local side of a comparison is the same shape with another routing."""
    assert str(Topology.parse(base).twin()) == twin


@pytest.mark.parametrize(
    "name", ["roles", "remote", "local", "pull", "share:0.25", "threshold:512"]
)
def test_a_policy_is_its_name(name):
    """A policy can be rebuilt from its name, which is what manifests keep."""
    assert parse_policy(name).name == name


@pytest.mark.parametrize("name", ["", "locale", "share:2", "share:x", "threshold:-1", "local:3"])
def test_an_unknown_policy_is_refused(name):
    """The message lists the forms that exist or the range that holds."""
    with pytest.raises(UsageError, match="policy"):
        parse_policy(name)


def features(turn: int = 2, new_tokens: int = 64, key: str = "c0/2") -> Features:
    return Features(turn, 2048, new_tokens, 128, 4.0, key=key)


def test_no_policy_moves_turn_1_or_a_replica_or_a_cold_home():
    """Turn 1 goes remote, an R serves every turn, a home that lost the KV is remote."""
    local = parse_policy("local")

    assert decide(local, features(turn=1), Role.D).reason == "turn1"
    assert decide(local, features(turn=1), Role.R).route is Route.REPLICA
    assert decide(local, features(), Role.D, holds_kv=False).reason == "cold"
    assert decide(local, features(), Role.D).route is Route.LOCAL


def test_a_threshold_includes_its_edge():
    """threshold:512 is local at 512 and remote at 513."""
    policy = parse_policy("threshold:512")

    assert decide(policy, features(new_tokens=512), Role.D).route is Route.LOCAL
    assert decide(policy, features(new_tokens=513), Role.D).route is Route.REMOTE


def test_a_share_is_close_to_what_was_asked_and_repeats():
    """Lots depend on the key alone, so two runs draw the same."""
    policy = parse_policy("share:0.3")
    drawn = [decide(policy, features(key=f"c{i}/2"), Role.D).route for i in range(4000)]

    assert drawn == [decide(policy, features(key=f"c{i}/2"), Role.D).route for i in range(4000)]
    assert 0.27 < sum(route is Route.LOCAL for route in drawn) / 4000 < 0.33


def test_placement_spreads_equally_and_keeps_homes():
    """Homes get equal shares, and a conversation keeps its own."""
    placement = Placement(Topology.parse("1R_1P_2D").homes)
    homes = [placement.home_of(f"c{i}").name for i in range(9)]

    assert {name: homes.count(name) for name in set(homes)} == {"r0": 3, "d0": 3, "d1": 3}
    assert [placement.home_of(f"c{i}").name for i in range(9)] == homes
