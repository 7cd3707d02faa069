"""What must hold of any simulated cluster, whatever its costs."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.core.topology import NAMED_TOPOLOGIES, Topology
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.sim.cluster import Capacity, Request, SimCluster
from ppdbench.sim.config import LINKS, Connector, Overheads, SimConfig
from ppdbench.sim.costs import CostTables
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Node, Sequence
from ppdbench.sim.prefix_cache import PrefixCache

SERVICE_S = 0.01
FREE = Overheads(0.0, 0.0, 0.0, 0.0)


def tables(dense_s) -> CostTables:
    nothing = ((0.0, 0.0), (0.0, 0.0))
    return CostTables(
        dense_s=dense_s,
        batches=(1, 2),
        contexts=(0, 1),
        decode_attention_s=nothing,
        chunks=(0, 1),
        prefixes=(0, 1),
        prefill_attention_s=nothing,
        source="test",
    )


class Queue:
    """A node as a single server: one sequence at a time, and each is one step of its tokens."""

    def __init__(self, dense_s) -> None:
        self.kernel = Kernel()
        self.waits_s: list[float] = []
        self.seen: list[int] = []
        self.node = Node(
            "r0",
            self.kernel,
            tables(dense_s),
            PrefixCache(10**9, 16, enabled=False),
            overheads=FREE,
            max_batched_tokens=10**9,
            max_sequences=1,
        )

    def serve(self, load: float, services: list[int], unit_s: float) -> list[float]:
        """Serve Poisson arrivals; returns the waits that Lindley's recursion gives for them."""
        rng = np.random.default_rng(7)
        gaps_s = rng.exponential(SERVICE_S / load, len(services)).tolist()
        at_s = wait_s = 0.0
        expected_s = []
        for i, (gap_s, tokens) in enumerate(zip(gaps_s, services, strict=True)):
            at_s += gap_s
            wait_s = max(0.0, wait_s + services[i - 1] * unit_s - gap_s) if i else 0.0
            expected_s.append(wait_s)
            self.kernel.at(at_s, self.arrive, (tokens, unit_s))
        self.kernel.run()
        return expected_s

    def arrive(self, job: tuple[int, float]) -> None:
        tokens, unit_s = job
        arrived_s = self.kernel.now_s
        self.seen.append(len(self.node.waiting) + len(self.node.running))

        def done(sequence: Sequence) -> None:
            self.waits_s.append(sequence.finished_at_s - arrived_s - tokens * unit_s)

        self.node.submit(Sequence(arrived_s, tokens, 1, on_done=done))


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_wait_is_that_of_an_m_d_1_queue(load):
    """Poisson arrivals at a server of constant service wait ρ/(2(1−ρ)) services on average.

    Customer by customer the wait is Lindley's recursion; the mean is within sampling error.
    """
    queue = Queue([0.0, SERVICE_S])
    lindley_s = queue.serve(load, [1] * 8000, SERVICE_S)

    assert queue.waits_s == pytest.approx(lindley_s, abs=1e-7)
    assert fmean(queue.waits_s) == pytest.approx(SERVICE_S * load / (2 * (1 - load)), rel=0.1)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_wait_is_that_of_an_m_m_1_queue(load):
    """With exponential service it is twice that: ρ/(1−ρ) services."""
    unit_s = SERVICE_S / 10_000
    tokens = np.random.default_rng(11).exponential(10_000, 8000).round().clip(1).astype(int)
    queue = Queue([0.0, unit_s, 2 * unit_s])
    lindley_s = queue.serve(load, tokens.tolist(), unit_s)

    assert queue.waits_s == pytest.approx(lindley_s, abs=1e-7)
    assert fmean(queue.waits_s) == pytest.approx(SERVICE_S * load / (1 - load), rel=0.15)


def test_littles_law():
    """Arrivals find on average as many sequences as come during one's stay (PASTA, L = λW)."""
    load = 0.7
    queue = Queue([0.0, SERVICE_S])
    queue.serve(load, [1] * 8000, SERVICE_S)
    stay_s = fmean(queue.waits_s) + SERVICE_S

    assert fmean(queue.seen) == pytest.approx(load / SERVICE_S * stay_s, rel=0.05)


NOTHING = Connector("nixl", 0.0, 0.0, 0.0, synchronous=False, can_pull=True)
COSTS = CostTables(
    dense_s=[0.0, *(5e-3 + 2e-5 * n for n in range(1, 2049))],
    batches=(1, 64),
    contexts=(0, 4096),
    decode_attention_s=((0.0, 1e-3), (0.0, 64e-3)),
    chunks=(0, 2048),
    prefixes=(0, 4096),
    prefill_attention_s=((0.0, 0.0), (20e-3, 40e-3)),
    source="test",
)
CAPACITY = Capacity(blocks=4000, kv_bytes_per_token=131_072, context_tokens=16_384)


def lone(topology: str, route: Route, **changes) -> tuple[float, float]:
    """TTFT and end of one request of 900 prompt and 50 output tokens on an idle cluster."""
    config = SimConfig(overheads=FREE, connector_profile=NOTHING, link="free", **changes)
    kernel = Kernel()
    cluster = SimCluster(Topology.parse(topology), config, kernel, COSTS, CAPACITY)
    ended: list[Request] = []
    home = "r0" if route is Route.REPLICA else "d0"
    prefill = None if route is Route.REPLICA else "p0"
    cluster.submit(Request("c", route, home, 900, 50, 0, ended.append, prefill))
    kernel.run()
    return ended[0].first_token_at_s, ended[0].finished_at_s


def test_a_free_hand_off_costs_a_lone_request_one_step_of_d():
    """P and D with nothing between them are a replica, but D computes the last prompt token again.

    The first token then comes one single-token step later, and so does the last.
    """
    replica_first, replica_end = lone("1R", Route.REPLICA)
    first, end = lone("1P_1D", Route.REMOTE)
    one_step = COSTS.dense_s(1) + COSTS.prefill_attention_s(1, 899)

    assert first - replica_first == pytest.approx(one_step)
    assert end - replica_end == pytest.approx(one_step)


ARRIVALS = [
    Arrival(0.05 * i, Conversation(f"c{i}", (Turn(1500, 60), Turn(40 + i, 30), Turn(300, 20))))
    for i in range(30)
]


def run(topology: str, policy: str, **changes):
    return run_simulated_point(
        Topology.parse(topology), parse_policy(policy), ARRIVALS, 20, SimConfig(**changes), 5
    )


def test_more_bandwidth_never_raises_ttft():
    """From Ethernet to no limit every turn of conversations that do not overlap comes earlier.

    With overlap a faster link may batch turns differently, as it may on a real cluster.
    """
    apart = [Arrival(30.0 * i, arrival.conversation) for i, arrival in enumerate(ARRIVALS[:6])]
    slowest_first = sorted(LINKS, key=lambda name: LINKS[name])
    ttfts = [
        [
            r.ttft_s
            for r in run_simulated_point(
                Topology.parse("1P_3D"), parse_policy("remote"), apart, 1, SimConfig(link=link), 5
            ).records
        ]
        for link in slowest_first
    ]

    for slower, faster in pairwise(ttfts):
        assert all(f <= s for s, f in zip(slower, faster, strict=True))
    assert fmean(ttfts[0]) > fmean(ttfts[-1])


@pytest.mark.parametrize("topology", NAMED_TOPOLOGIES)
@pytest.mark.parametrize("connector", ["nixl", "p2p_nccl"])
def test_tokens_are_conserved(topology, connector):
    """Every turn ends with its tokens; its prompt was cached or computed, never both or neither."""
    records = run(topology, "roles", connector=connector).records

    assert len(records) == 90
    assert all(r.ok and r.output_tokens == r.wanted_output_tokens for r in records)
    assert all(r.prompt_tokens == r.context_tokens + r.new_tokens for r in records)
    assert all(0 <= r.cached_tokens < r.prompt_tokens for r in records)
    assert all(r.recomputed_tokens <= r.context_tokens for r in records)


def test_a_full_history_connector_moves_more():
    """p2p_nccl sends the whole prompt each turn; nixl sends what D lacks."""
    moved = {
        c: run("2P_2D", "remote", connector=c).facts["bytes_moved"] for c in ("nixl", "p2p_nccl")
    }

    assert moved["p2p_nccl"] == 131_072 * sum(
        r.prompt_tokens for r in run("2P_2D", "remote", connector="p2p_nccl").records
    )
    assert moved["nixl"] < 0.6 * moved["p2p_nccl"]


def test_a_prompt_beyond_the_context_fails_and_the_rest_goes_on():
    """The node refuses what never fits; the conversation ends there, the others do not."""
    outcome = run("4R", "roles", max_context_tokens=1700)

    assert {r.outcome.value for r in outcome.records} == {"ok", "upstream_status"}
    assert sum(r.turn == 1 and r.ok for r in outcome.records) == 30
