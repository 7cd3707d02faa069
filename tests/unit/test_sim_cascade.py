"""Shared prefixes in the simulator, cascade attention's switch, and a node whose steps are seen."""

from __future__ import annotations

from functools import partial

import pytest

from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.sim.cascade import AttentionShape, SharedKey, SharedPrefixCache, uses_cascade
from ppdbench.sim.config import SimConfig
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Sequence

LLAMA_8B = AttentionShape(heads=32, kv_heads=8)


@pytest.mark.parametrize(
    ("prefix", "requests", "expected"),
    [(2048, 16, False), (2048, 17, True), (2048, 250, True), (255, 250, False), (2048, 7, False)],
)
def test_cascade_begins_where_vllm_begins_it(prefix, requests, expected):
    """From 17 requests for this head layout on 132 SMs, never below 256 tokens or 8 requests."""
    assert uses_cascade(LLAMA_8B, prefix, requests) is expected


def test_a_pinned_prefix_is_held_once_for_all():
    """Two sequences hold the shared blocks once; what they have of their own comes and goes."""
    cache = SharedPrefixCache(100, 16)
    cache.pin("p", 320)
    for own in ("a", "b"):
        key = SharedKey("p", 320, own)
        assert cache.hit_blocks(key, 320) == 20
        cache.take(key, 20, 2)
    assert cache.held == 20 + 2 * 2

    cache.release(SharedKey("p", 320, "a"), 22, 340)
    assert cache.held == 20 + 2


def step_time(*, cascade: bool, outsider: bool) -> float:
    """Seconds of a decode step of 64 sequences over one shared prefix of 2,048 tokens."""
    engine = SimulatedEngine(SimConfig(), seed=0, cascade=cascade)
    kernel = Kernel()
    node = engine.node(kernel, lambda _: None)
    node.cache.pin("p", 2048)
    keys = [SharedKey("p", 2048, str(i)) for i in range(64)]
    for key in [*keys, "outsider"] if outsider else keys:
        node.submit(Sequence(key, 2064, 64, on_done=lambda _: None, matching_tokens=2048))
    kernel.run()
    return node.step_ends_s[40] - node.step_ends_s[39]


def test_one_request_outside_the_prefix_switches_cascade_off_for_all():
    """With cascade a shared prefix is read once; one outsider costs as much as having none."""
    shared = step_time(cascade=True, outsider=False)
    broken = step_time(cascade=True, outsider=True)
    without = step_time(cascade=False, outsider=True)

    assert broken == pytest.approx(without)
    assert broken > 1.25 * shared


def test_every_step_is_seen_and_an_alarm_rings_at_its_step():
    """Token instants are the ends of steps, and a stretch is cut where an alarm was set."""
    kernel = Kernel()
    node = SimulatedEngine(SimConfig(), seed=0).node(kernel, lambda _: None)
    sequence = Sequence("s", 64, 50, on_done=lambda _: None)
    rung: list[int] = []
    node.at_step(20, lambda: rung.append(node.steps))
    node.at_step(20, partial(node.at_step, 5, lambda: rung.append(-node.steps)))
    node.submit(sequence)
    kernel.run()

    instants = node.token_at_s(sequence)
    assert rung == [20, -20]
    assert len(node.step_ends_s) == node.steps == 50
    assert len(instants) == 50
    assert instants[0] == sequence.first_token_at_s
    assert instants[-1] == pytest.approx(sequence.finished_at_s)
    assert instants == sorted(instants)
