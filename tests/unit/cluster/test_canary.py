"""Canaries, preflight and the emulated link against FakeEngines, which speak the hand-off."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from ppdbench.cluster.canary import BLIND, Path, check_canaries, differences, paths_of, preflight
from ppdbench.cluster.contract import Node
from ppdbench.cluster.link import SlowLink, measure_link
from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError, UsageError
from ppdbench.core.topology import Role
from ppdbench.testing import FakeEngine, Fault, FaultKind, ScriptedCluster, Service, every, tokens

D = Path(Route.LOCAL, Node("d0", Role.D, "http://127.0.0.1:1"))


@asynccontextmanager
async def cluster(topology, make=None):
    async with ScriptedCluster(topology, *([] if make is None else [make])) as scripted:
        yield scripted.spec


async def test_every_path_of_a_topology_is_checked():
    """Each P to each D by each hand-off route, each D alone, each R."""
    async with cluster("1R_2P_1D_1pD") as spec:
        paths = [str(path) for path in paths_of(spec, pull=True)]

    assert sorted(paths) == sorted(
        [f"{route} {p}→{d}" for route in ("remote", "pull") for p in ("p0", "p1")
         for d in ("d0", "pd0")] + ["local d0", "local pd0", "replica r0"]
    )  # fmt: skip


@pytest.mark.parametrize("topology", ["1P_1D", "2R", "1R_1P_1D_1pD"])
async def test_a_sound_cluster_has_nothing_to_report(topology):
    """Every route answers with the tokens of a node alone."""
    async with cluster(topology) as spec:
        assert await asyncio.to_thread(check_canaries, spec, "fake", pull=True) == []


@pytest.mark.parametrize(("blind", "told"), [(False, []), (True, [BLIND])])
async def test_an_engine_that_answers_every_prompt_alike_is_told(blind, told, monkeypatch):
    """As with vLLM's dummy weights: the comparison could not fail."""
    if blind:
        monkeypatch.setattr(tokens, "reply_ids", lambda _, count: [7] * count)
    said = []
    async with cluster("1P_1D") as spec:
        problems = await asyncio.to_thread(check_canaries, spec, "fake", notice=said.append)

    assert problems == []
    assert said == told


@pytest.mark.parametrize(
    ("got", "wanted", "words"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], []),
        ([1, 2, 3, 9], [1, 2, 3, 4], []),
        ([1, 9, 3, 4], [1, 2, 3, 4], ["token 2 is 9, a node alone computes 2"]),
        ([1, 2], [1, 2, 3, 4], ["2 and 4 tokens came"]),
    ],
)
def test_tokens_must_agree_as_far_as_is_stated(got, wanted, words):
    """Beyond it they may part, because a GPU's kernels may."""
    found = list(differences(D, got, wanted, agree_tokens=3))

    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


async def test_a_pair_that_is_slow_at_first_may_try_again():
    """Two good hand-offs in a row are enough; a failed handshake is not the end."""
    fail_first = every(1000, Fault(FaultKind.STATUS, status=500), of=(0,))

    def make(node):
        return FakeEngine(faults=fail_first) if node.role is Role.D else FakeEngine()

    async with cluster("1P_1D", make) as spec:
        await asyncio.to_thread(preflight, spec, "fake", 5.0)


async def test_a_hand_off_that_never_returns_is_given_up_and_tried_anew():
    """P's lease may end before the handshake does; that request hangs and the next one passes."""
    hang_first = every(1000, Fault(FaultKind.HANG), of=(0,))

    def make(node):
        return FakeEngine(faults=hang_first) if node.role is Role.D else FakeEngine()

    async with cluster("1P_1D", make) as spec:
        await asyncio.wait_for(asyncio.to_thread(preflight, spec, "fake", 0.5), 20)


async def test_a_pair_that_never_gets_there_is_an_error_with_the_network_in_it(monkeypatch):
    """All attempts too slow: the sentence names the pair, the limit and where to look."""
    monkeypatch.setattr("ppdbench.cluster.canary._PREFLIGHT_WITHIN_S", 0.5)
    async with cluster("1P_1D", lambda _: FakeEngine(service=Service(0.05))) as spec:
        with pytest.raises(EngineError, match=r"p0→d0.*UCX_NET_DEVICES"):
            await asyncio.to_thread(preflight, spec, "fake", 0.01)


async def test_a_node_that_died_is_not_waited_for():
    """Its own reason is given, at once, rather than three minutes of a network that is fine."""

    def make(node):
        refuse = every(1, Fault(FaultKind.STATUS)) if node.role is Role.D else None
        return FakeEngine(faults=refuse)

    async with cluster("1P_1D", make) as spec:
        gone = asyncio.to_thread(preflight, spec, "fake", 5.0, ended=lambda: {"d0": "d0 ended"})
        with pytest.raises(EngineError, match=r"^d0 ended$"):
            await asyncio.wait_for(gone, 20)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: FakeEngine(honest_handoff=False), "NixlConnector"),
        (lambda _: FakeEngine(faults=every(1, Fault(FaultKind.STATUS, status=401))), "401"),
    ],
)
async def test_what_waiting_cannot_mend_is_not_waited_for(make, words):
    """A P without the connector, a wrong key: the same answer would come for three minutes."""
    async with cluster("1P_1D", make) as spec:
        with pytest.raises(EngineError, match=rf"p0→d0.*{words}") as refused:
            await asyncio.wait_for(asyncio.to_thread(preflight, spec, "fake", 5.0), 20)

    assert "UCX" not in str(refused.value)


def test_the_delay_is_what_the_slow_link_adds():
    """Blocks that D lacks × bytes / rate, less what the real transfer takes, never negative."""
    link = SlowLink(bytes_per_s=1e6, kv_bytes_per_token=100, real_s_per_byte=0, block_tokens=10)
    assert link.delay_s(95, 0) == pytest.approx(100 * 100 / 1e6)
    assert link.delay_s(95, 39) == pytest.approx(70 * 100 / 1e6)
    assert link.delay_s(5, 100) == 0

    real = SlowLink(1e6, 100, real_s_per_byte=0.4e-6, block_tokens=10)
    assert real.delay_s(95, 0) == pytest.approx(0.6 * 100 * 100 / 1e6)
    slower = SlowLink(1e6, 100, real_s_per_byte=2e-6, block_tokens=10)
    assert slower.delay_s(95, 0) == 0


async def test_the_link_is_measured_on_what_d_counts():
    """KV bytes per token come from the engine's own counters, not from a model's name."""
    async with cluster("1P_1D") as spec:
        link = await asyncio.to_thread(measure_link, spec, "fake", 16, 1e9)

    assert link.kv_bytes_per_token == pytest.approx(1024, rel=0.02)


async def test_a_cluster_without_hand_offs_has_no_link_to_slow_down():
    """Replicas move nothing."""
    async with cluster("2R") as spec:
        with pytest.raises(UsageError, match="hands nothing over"):
            await asyncio.to_thread(measure_link, spec, "fake", 16, 1e9)
