"""What a million conversations leave behind."""

from __future__ import annotations

import psutil
import pytest

from ppdbench.cluster.contract import cluster_from_options
from ppdbench.router.answer import Counted
from ppdbench.router.board import ArrivalRate
from ppdbench.router.choose import Chooser
from ppdbench.router.config import RouterConfig
from ppdbench.router.history import Answer
from ppdbench.router.nodes import Upstreams
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer

WARM, COUNTED = 200_000, 1_000_000
GROWTH_LIMIT_BYTES = 2 * 1024 * 1024


@pytest.mark.full
def test_resident_memory_is_flat_over_a_million_conversations():
    """Once the notes have filled their table, new conversations only take old ones' places."""
    cluster = cluster_from_options(["P=http://127.0.0.1:1", "D=http://127.0.0.1:2"])
    config = RouterConfig(cluster=cluster, policy="local")
    shared = Shared.over(make_buffer(config), config, 0)
    upstreams = Upstreams(cluster, shared.board)
    chooser = Chooser(upstreams, load_policy(config), shared.memory, ArrivalRate(shared.board))
    process = psutil.Process()

    def serve(conversations: range) -> int:
        for at in conversations:
            body = {"model": "m", "messages": [{"role": "user", "content": f"hello number {at}"}]}
            plan = chooser.plan(body, None, 1000.0 + at / 1000)
            answer, counted = Answer("fine", tokens=2), Counted(5, 2, 0)
            chooser.learn(plan, body, counted, 1000.0 + at / 1000)
            chooser.note(plan, answer, 5, 1000.0 + at / 1000)
        return process.memory_info().rss

    before = serve(range(WARM))
    after = serve(range(WARM, WARM + COUNTED))

    assert after - before < GROWTH_LIMIT_BYTES
    assert shared.memory.evicted > COUNTED
    assert shared.memory.used() <= shared.memory.capacity
