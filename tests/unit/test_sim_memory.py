"""A node that runs short of KV blocks preempts, and never holds more than it has."""

from __future__ import annotations

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.topology import Topology
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.sim.config import Overheads, SimConfig
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Node, Sequence
from ppdbench.sim.prefix_cache import PrefixCache
from ppdbench.sim.prepare import costs_for


@pytest.mark.parametrize("share", [0.24, 0.25, 0.26])
def test_prompts_leave_the_blocks_that_decoding_needs_in_the_same_step(share):
    """60 chats at once on a few hundred blocks: turns are preempted, and all of them end well."""
    arrivals = [
        Arrival(i * 0.01, Conversation(f"c{i}", (Turn(100 + i, 200 + 3 * i), Turn(16, 64))))
        for i in range(60)
    ]

    outcome = run_simulated_point(
        Topology.parse("1R"),
        parse_policy("roles"),
        arrivals,
        10.0,
        SimConfig(gpu_memory_utilization=share),
        seed=1,
    )

    assert outcome.timing["preemptions"] > 0
    assert len(outcome.records) == 120
    assert all(record.ok for record in outcome.records)


def test_a_preempted_sequence_does_not_stand_before_kv_that_has_come():
    """Six blocks, one sequence at a time: one outgrows its two, the arrived one holds four.

    Preempted, it needs three blocks and two are free: were it first in line, both would wait for
    ever.
    """
    kernel, done = Kernel(), []
    node = Node(
        "d0",
        kernel,
        costs_for(SimConfig(costs="roofline")),
        PrefixCache(6, 16),
        overheads=Overheads(),
        max_batched_tokens=8192,
        max_sequences=1,
    )
    growing = Sequence("growing", 30, 20, on_done=done.append)
    fetched = Sequence("fetched", 60, 4, on_done=done.append, fetch=lambda _: None)
    node.submit(fetched)
    node.submit(growing)
    kernel.at(1e-6, lambda _: node.kv_arrived(fetched, 59))
    kernel.run()

    assert [sequence.key for sequence in done] == ["fetched", "growing"]
