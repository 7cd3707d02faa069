"""A node that runs short of KV blocks preempts, and never holds more than it has."""

from __future__ import annotations

import pytest

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.topology import Topology
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.parse import parse_policy
from ppdbench.sim.config import SimConfig


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
