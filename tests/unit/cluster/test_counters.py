from __future__ import annotations

import pytest

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.counters import Counters, Gauges, Reading, read_metrics
from ppdbench.cluster.proof import prove
from ppdbench.core.decision import Route
from ppdbench.core.topology import Role

EXPOSITION = """\
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 70.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 640.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 30.0
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 2.0
vllm:nixl_bytes_transferred_count{engine="0"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0"} 1310720.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
unlabelled_total 1.0
"""


def test_metrics_are_read_once_each_and_added_over_engines():
    """A label-less total must not count twice, and two engines of a node are one node."""
    reading = read_metrics(EXPOSITION)

    assert reading.counters.computed_tokens == 100
    assert reading.counters.cache_hit_tokens == 640
    assert reading.counters.received_bytes == 1310720
    assert reading.gauges.running == 3


def test_what_a_node_does_not_say_is_none():
    """A missing counter is not 0, and neither is a difference with it."""
    reading = read_metrics(EXPOSITION)

    assert reading.counters.received_tokens is None
    assert reading.counters.since(reading.counters).received_tokens is None


P, D, R = (Node(r.lower() + "0", r, f"http://{r}:1") for r in (Role.P, Role.D, Role.R))
ZERO = Counters(*[0.0] * 11)


def counted(**values):
    return Reading(Counters(**{f: values.get(f, 0.0) for f in Counters.__slots__}), Gauges())


def proof_of(p, d, turns):
    before = {"p0": Reading(ZERO, Gauges()), "d0": Reading(ZERO, Gauges())}
    return prove(ClusterSpec((P, D)), before, {"p0": p, "d0": d}, turns)


def test_a_remote_and_a_local_turn_are_proven_by_one_transfer():
    """P finished one request, D read KV once: one remote turn, whatever was local."""
    proof = proof_of(
        counted(finished_requests=1, computed_tokens=600),
        counted(transfers=1, received_bytes=5, received_tokens=600, computed_tokens=70),
        {Route.REMOTE: 1, Route.LOCAL: 1},
    )

    assert (proof.proven, proof.problems, proof.bytes_moved) == (True, (), 5)
    assert (proof.computed_on_prefill_tokens, proof.computed_on_home_tokens) == (600, 70)


@pytest.mark.parametrize(
    ("p", "d", "turns", "word"),
    [
        ({"finished_requests": 1}, {}, {Route.REMOTE: 1}, "local in secret"),
        ({}, {"transfers": 1, "received_tokens": 9}, {Route.LOCAL: 1}, "received 9"),
        ({"finished_requests": 1}, {"transfers": 1}, {Route.REMOTE: 2}, "finished 1"),
        ({"finished_requests": 1}, {"transfers": 2}, {Route.REMOTE: 1}, "2 times for 1"),
        ({"finished_requests": 1}, {"transfers": 1, "failed_transfers": 1}, {Route.REMOTE: 1},
         "failed 1"),
        ({"finished_requests": 1, "expired_hand_offs": 1}, {"transfers": 1}, {Route.REMOTE: 1},
         "nobody read"),
        ({"finished_requests": 1}, {"transfers": 1}, {Route.PULL: 1}, "no P read"),
        ({"finished_requests": 1, "transfers": 1}, {"transfers": 1}, {Route.REMOTE: 1},
         "P nodes read"),
        ({"finished_requests": 1}, {"transfers": None}, {Route.REMOTE: 1}, "local in secret"),
        ({"finished_requests": -5}, {"transfers": 1}, {Route.REMOTE: 1}, "p0 counts less"),
    ],
)  # fmt: skip
def test_what_contradicts_the_routes_is_named(p, d, turns, word):
    """Every way in which the counters refute the turns is a problem with its numbers."""
    proof = proof_of(counted(**p), counted(**d), turns)

    assert proof.proven is False
    assert word in " ".join(proof.problems)


def test_kv_that_d_offered_and_no_pull_took_is_no_problem():
    """D holds each finished turn for a while where pulls are on; letting go of it is as planned."""
    proof = proof_of(
        counted(finished_requests=1),
        counted(transfers=1, received_tokens=9, expired_hand_offs=1),
        {Route.REMOTE: 1},
    )

    assert proof.proven is True


@pytest.mark.parametrize(("received", "proven"), [(9.0, True), (None, None)])
def test_a_hand_off_is_proven_by_kv_that_came_and_by_nothing_else(received, proven):
    """A connector may count tokens and no transfers; where it counts neither, nobody knows."""
    proof = proof_of(
        counted(finished_requests=1),
        counted(transfers=None, received_tokens=received),
        {Route.REMOTE: 1},
    )

    assert proof.proven is proven


def test_nodes_that_count_nothing_prove_nothing():
    """Without the counters the proof is unknown, not good and not bad."""
    silent = Reading(Counters(), Gauges())
    proof = prove(ClusterSpec((R,)), {"r0": silent}, {"r0": silent}, {Route.REPLICA: 3})

    assert (proof.proven, proof.bytes_moved) == (None, None)
