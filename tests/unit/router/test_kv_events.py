"""Evictions by KV events: what they are taken to mean, and a real publisher before the router."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdbench.cluster.contract import cluster_from_options
from ppdbench.router.config import RouterConfig
from ppdbench.router.nodes import Upstreams
from ppdbench.router.residency import LAST_BLOCK_S, NotKvEventsError, Residency, read_events
from ppdbench.router.shared import Shared, clear_gauges, make_buffer

from .publisher import CLEARED, Publisher, encoded, removed, stored

pytestmark = pytest.mark.timeout(60)
BEGAN_S = 1000.0


def as_arrays(*events):
    """As engines before the maps sent them."""
    return encoded(*([*event.values()] for event in events))


@pytest.mark.parametrize("encode", [encoded, as_arrays])
@pytest.mark.parametrize("name", [b"\x01" * 32, 2**63 + 5])
def test_a_removed_block_tells_that_all_as_old_is_gone(encode, name):
    """In either form of the protocol, with hashes as bytes or as numbers."""
    blocks = Residency(BEGAN_S)
    assert blocks.gone_by(read_events(encode(stored(name, b"other"))), 1010.0) == 0.0

    gone_s = blocks.gone_by(read_events(encode(removed(name))), 1100.0)

    assert gone_s == 1010.0 + LAST_BLOCK_S
    assert len(blocks) == 1


def test_what_is_gone_is_never_later_than_now():
    """Of a node that loses blocks as soon as they are stored, too."""
    blocks = Residency(BEGAN_S)
    blocks.gone_by([stored(b"a")], 1010.0)

    assert blocks.gone_by([removed(b"a")], 1010.5) == 1010.5


def test_a_cleared_cache_holds_nothing():
    """All that was stored before is gone, and later blocks are new ones."""
    blocks = Residency(BEGAN_S)
    blocks.gone_by([stored(b"a")], 1010.0)

    assert blocks.gone_by([CLEARED, stored(b"a")], 1050.0) == 1050.0
    assert blocks.gone_by([removed(b"a")], 1100.0) == 1050.0 + LAST_BLOCK_S


def test_a_block_older_than_our_knowledge_counts_as_old_as_that():
    """Its real time is not known, so nothing from before is trusted any more."""
    assert Residency(BEGAN_S).gone_by([removed(b"never seen")], 1100.0) == BEGAN_S


def test_memory_is_bounded_and_what_is_forgotten_stays_old():
    """The oldest goes; its removal then says at least as much as it would have said."""
    blocks = Residency(BEGAN_S, limit=3)
    for at in range(10):
        blocks.gone_by([stored(b"%d" % at)], 1010.0 + at)

    assert len(blocks) == 3
    assert blocks.gone_by([removed(b"2")], 1100.0) == 1016.0


def test_the_same_block_twice_counts_by_its_first_time():
    """Which of the two copies went is not said, and the earlier time holds for both."""
    blocks = Residency(BEGAN_S)
    blocks.gone_by([stored(b"a")], 1010.0)
    blocks.gone_by([stored(b"a")], 1050.0)

    assert blocks.gone_by([removed(b"a")], 1100.0) == 1010.0 + LAST_BLOCK_S


@pytest.mark.parametrize(
    ("kept", "lost"),
    [
        (stored(b"a", group=1, kind="sliding_window"), removed(b"a", group=1)),
        (stored(b"a", group=1, kind="mamba"), removed(b"a", group=1)),
        (stored(b"a", medium="CPU"), removed(b"a", medium="CPU")),
        (stored(b"a", block_size=4), removed(b"a")),
    ],
)
def test_what_goes_without_being_missed_says_nothing(kept, lost):
    """Blocks behind a sliding window, of an offload tier, or replaced because they filled up."""
    blocks = Residency(BEGAN_S)
    blocks.gone_by([stored(b"whole"), kept], 1010.0)

    assert blocks.gone_by([lost], 1100.0) == 0.0


def test_events_of_a_later_vllm_are_passed_over():
    """An unknown kind of event is no error; what is known beside it counts."""
    events = read_events(encoded({"type": "BlockRested"}, CLEARED, ["Another", 1]))

    assert events == [CLEARED]


NONSENSE = [
    b"", b"\xc1", b"GET / HTTP/1.1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1]),
    encoded(7), encoded([]), encoded({"no": "type"}), encoded({"type": "BlockRemoved"}),
    encoded(removed(1.5)), encoded(removed([1])), encoded(removed(b"a", group="x")),
    encoded(stored(b"a") | {"block_size": None}),
]  # fmt: skip


@pytest.mark.parametrize("payload", NONSENSE)
def test_nonsense_is_one_kind_of_error(payload):
    """Whatever arrives, the reader knows it for what it is."""
    with pytest.raises(NotKvEventsError):
        read_events(payload)


@given(st.binary(max_size=200) | st.builds(encoded, st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["type", "block_hashes", "group_idx", "medium"]), inner),
    max_leaves=8,
)))  # fmt: skip
def test_no_message_breaks_the_reader(payload):
    """It is read or refused; what is read can be taken in."""
    try:
        events = read_events(payload)
    except NotKvEventsError:
        return
    assert Residency(BEGAN_S).gone_by(events, 1100.0) in (0.0, BEGAN_S, 1100.0)


@pytest.fixture
async def publisher():
    with Publisher() as publisher:
        yield publisher


@pytest.fixture
async def bench(bench_for, publisher):
    """A 1P_1D whose D publishes; the first batch has been read."""
    bench = await bench_for("1P_1D", policy="local", kv_events=publisher.endpoint)
    await publisher.subscribed()
    return bench


async def taken(bench, *, name="kv_events", count):
    async with asyncio.timeout(10):
        while bench.total(name) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def begin(bench, name="one"):
    opening = [{"role": "user", "content": f"{name} " * 400}]
    answer = {"role": "assistant", "content": (await bench.chat(opening)).text()}
    return [*opening, answer, {"role": "user", "content": "go on"}]


async def test_an_evicted_conversation_is_cold_before_a_turn_is_lost(bench, publisher):
    """The removal alone is enough, and the turn after the cold one goes home again."""
    await publisher.send(stored(b"a", b"b"))
    await taken(bench, count=1)
    talk = await begin(bench)
    await publisher.send(removed(b"b"))
    await taken(bench, count=2)

    cold = await bench.chat(talk)

    assert (cold.route, cold.reason, cold.node) == ("remote", "cold", "d0")
    assert not [d for d in await decisions(bench) if d["route"] == "local"]


async def decisions(bench):
    return (await bench.get("/ppd/decisions")).json()["decisions"]


async def test_blocks_that_are_stored_make_nothing_cold(bench, publisher):
    """Nor do removals of what went before this conversation."""
    await publisher.send(stored(b"a"))
    await taken(bench, count=1)
    talk = await begin(bench)
    home = bench.router.upstreams["d0"]
    home.gone_s.put(time.time() - 5)

    assert (await bench.chat(talk)).route == "local"
    assert b'ppd_node_kv_events_connected{node="d0"} 1.0' in (await bench.get("/metrics")).body


async def test_a_cleared_node_holds_nothing(bench, publisher):
    """As after a restart: each of its conversations is cold once."""
    talks = [await begin(bench, name) for name in ("one", "two")]
    await publisher.send(CLEARED)
    await taken(bench, count=1)

    assert [(await bench.chat(talk)).reason for talk in talks] == ["cold", "cold"]


async def test_a_wall_clock_that_is_set_makes_nothing_cold_for_longer(
    bench, publisher, monkeypatch
):
    """Events and turns are told apart by one clock: an hour ahead is not an hour of cold turns."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    await publisher.send(CLEARED)
    await taken(bench, count=1)
    await asyncio.sleep(1.1)

    assert (await bench.chat(await begin(bench))).route == "local"


@pytest.mark.parametrize("number", [7, 0])
async def test_missing_numbers_mean_that_removals_were_missed(bench, publisher, number):
    """All that the node held is cold: batches are missing, or its publisher began anew."""
    await publisher.send(stored(b"a"))
    await publisher.send(stored(b"b"))
    await taken(bench, count=2)
    talk = await begin(bench)
    publisher.number = number
    await publisher.send(stored(b"c"))
    await taken(bench, count=3)

    assert (await bench.chat(talk)).reason == "cold"
    assert bench.total("kv_events_gaps") == 1


async def test_a_publisher_that_speaks_nonsense_is_said_once_and_changes_nothing(
    bench, publisher, caplog
):
    """Counted, logged once, and turns go on by cached_tokens."""
    talk = await begin(bench)
    for payload in NONSENSE:
        await publisher.send_raw(b"", bytes(8), payload)
    await publisher.send_raw(b"alone")
    await publisher.send_raw(b"", b"\xff" * 8, encoded(CLEARED))
    await taken(bench, name="kv_events_bad", count=len(NONSENSE) + 2)

    assert (await bench.chat(talk)).route == "local"
    assert len([r for r in caplog.records if "cannot be read" in r.message]) == 1


async def test_where_events_are_heard_few_cached_tokens_are_no_eviction(bench, publisher):
    """A template may have moved what was said before; what is gone the events say."""
    talks = [await begin(bench, name) for name in ("one", "two")]
    await publisher.send(stored(b"a"))
    await taken(bench, count=1)
    assert bench.engines["d0"].reset_prefix_cache()

    answers = [await bench.chat(talk) for talk in talks]

    assert [answer.route for answer in answers] == ["local", "local"]


def test_nobody_hears_events_behind_a_listener_that_died_or_has_ended(tmp_path):
    """The next router may have no address to listen to: cached_tokens go on."""
    config = RouterConfig(
        cluster=cluster_from_options(["P=http://127.0.0.1:1", "D=http://127.0.0.1:2"]),
        policy="local", workers=2, state_file=tmp_path / "state",
    )  # fmt: skip
    buffer = make_buffer(config)

    def heard():
        return Upstreams(config.cluster, Shared.over(buffer, config, 1).board)["d0"].is_heard

    def listen():
        home = Upstreams(config.cluster, Shared.over(buffer, config, 0).board)["d0"]
        home.kv_connected.put(1.0)
        home.kv_readable.put(1.0)

    listen()
    clear_gauges(buffer, config, 1)
    assert heard()
    clear_gauges(buffer, config, 0)
    assert not heard()

    listen()
    buffer = make_buffer(config)
    assert not heard()


@pytest.mark.parametrize("message", [None, (b"", bytes(8), b"nonsense")])
async def test_a_publisher_that_says_nothing_of_use_is_not_heard(bench, publisher, message):
    """It is connected all the same; cached_tokens tell of evictions as without it."""
    talks = [await begin(bench, name) for name in ("one", "two")]
    if message is not None:
        await publisher.send(stored(b"a"))
        await publisher.send_raw(*message)
        await taken(bench, name="kv_events_bad", count=1)
    assert bench.engines["d0"].reset_prefix_cache()

    lost, cold = [await bench.chat(talk) for talk in talks]

    assert (lost.route, cold.reason) == ("local", "cold")
    assert b'ppd_node_kv_events_connected{node="d0"} 1.0' in (await bench.get("/metrics")).body


async def test_a_publisher_that_is_not_there_stops_nothing(bench_for, publisher, caplog):
    """Said once; cached_tokens tell of evictions as without an address."""
    endpoint = publisher.endpoint
    publisher.close()
    bench = await bench_for("1P_1D", policy="local", kv_events=endpoint)
    talks = [await begin(bench, name) for name in ("one", "two")]
    assert bench.engines["d0"].reset_prefix_cache()

    lost, cold = [await bench.chat(talk) for talk in talks]
    await asyncio.sleep(0.6)

    assert (lost.route, cold.reason) == ("local", "cold")
    assert len([r for r in caplog.records if "are not there" in r.message]) == 1
    assert b'ppd_node_kv_events_connected{node="d0"} 0.0' in (await bench.get("/metrics")).body
