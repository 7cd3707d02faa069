"""Whole points on real vLLM: cold caches, proven paths, effective append lengths."""

from __future__ import annotations

import pytest
import uvloop

from ppdbench.cluster.tiny_model import VOCABULARY
from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Route
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.parse import parse_policy

pytestmark = pytest.mark.full

PLAN = (Turn(400, 24), Turn(60, 16, think_s=0.05), Turn(80, 16, think_s=0.05))
ARRIVALS = [Arrival(0.25 * i, Conversation(f"c{i}", PLAN)) for i in range(4)]


def measure(cluster, policy):
    settings = LiveSettings(TurnSettings(cluster.facts.model, vocabulary=VOCABULARY))
    return uvloop.run(
        run_live_point(cluster.spec, parse_policy(policy), ARRIVALS, 4.0, settings, 7)
    )


def test_the_same_point_twice_is_cold_both_times(one_p_one_d):
    """Equal seeds send equal prompts to engines that still hold them; the salt keeps them apart."""
    for _ in range(2):
        outcome = measure(one_p_one_d, "local")

        assert [r.error for r in outcome.records if not r.ok] == []
        assert {r.cached_tokens for r in outcome.records if r.turn == 1} == {0}
        assert outcome.facts["path_proven"] is True


def test_a_local_turn_computes_its_new_tokens_and_moves_nothing(one_p_one_d):
    """Effective append length: the new tokens and at most an incomplete block of history.

    Only Turn 1 moves KV under ``local``; under ``remote`` every turn does.
    """
    block = one_p_one_d.facts.block_size
    local, remote = (measure(one_p_one_d, policy) for policy in ("local", "remote"))

    for record in local.records:
        assert record.ok, record.error
        if record.turn > 1:
            assert record.route is Route.LOCAL
            assert record.new_tokens <= record.effective_new_tokens < record.new_tokens + block + 1
    assert all(r.ok and r.route is Route.REMOTE for r in remote.records)
    assert remote.facts["path_proven"] is True
    assert 0 < local.facts["bytes_moved"] < remote.facts["bytes_moved"]
    replies = [[len(r.token_at_s) for r in point.records] for point in (local, remote)]
    assert sorted(replies[0]) == sorted(replies[1])
