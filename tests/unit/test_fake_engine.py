"""FakeEngine keeps its promises: tokens, pacing, slots, cache, hand-off, faults, counters."""

from __future__ import annotations

import asyncio

import pytest

from ppdbench.cluster import nixl
from ppdbench.cluster.contract import Node
from ppdbench.cluster.engine import probe
from ppdbench.core.topology import Role
from ppdbench.http.client import Pool
from ppdbench.http.errors import BrokenError
from ppdbench.http.messages import Origin, Request
from ppdbench.http.reply import Reply
from ppdbench.testing import FakeEngine, Fault, FaultKind, Service, every
from ppdbench.testing.tokens import decode, encode, encode_chat, reply_ids


@pytest.fixture
async def pool():
    pool = Pool()
    yield pool
    await pool.close()


async def post(pool, engine, body, path="/v1/completions"):
    return await pool.fetch(Origin.parse(engine.url), Request.json(path, body), timeout_s=5)


async def ask(pool, engine, prompt, count=4, **more):
    body = {"prompt": prompt, "max_tokens": count, "return_token_ids": True, **more}
    return (await post(pool, engine, body)).json()


async def metric(pool, engine, name):
    text = (await pool.fetch(Origin.parse(engine.url), Request("GET", "/metrics"))).body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


PROMPT = list(range(100, 165))


async def test_tokens_are_known_and_the_same_streamed_or_whole(pool):
    """A reply depends on the prompt alone."""
    async with FakeEngine() as engine:
        whole = await ask(pool, engine, PROMPT)
        body = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True, "stream": True}
        streamed = Reply()
        streamed.feed((await post(pool, engine, body)).body, 0.0)

    assert whole["choices"][0]["token_ids"] == streamed.token_ids == reply_ids(PROMPT, 4)
    assert streamed.prompt_token_ids == PROMPT
    assert streamed.ended


async def test_chat_replies_come_back_as_the_same_ids():
    """A chat with its own reply in it starts with what the engine has seen."""
    first = [{"role": "user", "content": "hello there"}]
    ids = encode_chat(first)
    reply = reply_ids(ids, 5)
    second = [*first, {"role": "assistant", "content": decode(reply)}]

    assert encode(decode(reply)) == reply
    assert encode_chat([*second, {"role": "user", "content": "x"}])[: len(ids) + 5] == ids + reply


async def test_chat_streams_a_role_first_and_usage_last(pool):
    """As vLLM does, so clients meet both here."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with FakeEngine() as engine:
        text = (await post(pool, engine, body, "/v1/chat/completions")).body
    reply = Reply()
    reply.feed(text, 0.0)

    assert text.split(b"\n\n")[0].find(b'"role":"assistant"') > 0
    assert (reply.prompt_tokens, reply.completion_tokens) == (4, 2)


async def test_the_prefix_cache_counts_whole_blocks_and_salts_keep_apart(pool):
    """65 prompt tokens and 4 in reply leave four blocks of 16; another salt finds none."""
    async with FakeEngine() as engine:
        cached = [
            (await ask(pool, engine, prompt, cache_salt=salt))["usage"]["prompt_tokens_details"]
            for prompt, salt in [(PROMPT, "a"), (PROMPT, "a"), (PROMPT, "b"), (PROMPT[:40], "a")]
        ]
        assert await metric(pool, engine, "vllm:prompt_tokens_by_source_total{") == 3 * 65 + 40

    assert [c["cached_tokens"] for c in cached] == [0, 64, 0, 32]


async def test_a_hand_off_moves_only_what_d_lacks_and_happens_once(pool):
    """P prefills, D pulls; the counters of both say so; the offer is gone afterwards."""
    async with FakeEngine() as p, FakeEngine() as d:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
        given = nixl.read_prefilled((await post(pool, p, nixl.prefill_body(body))).json())
        answer = (await post(pool, d, nixl.decode_body(body, given))).json()
        again = (await post(pool, d, nixl.decode_body(body, given))).json()

        assert answer["choices"][0]["token_ids"] == reply_ids(PROMPT, 4)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["choices"][0]["token_ids"] == reply_ids(PROMPT, 4)
        assert await metric(pool, d, "vllm:nixl_bytes_transferred_sum") == 64 * 1024
        assert await metric(pool, d, "vllm:nixl_num_failed_transfers_total") == 1
        held = nixl.held_kv(answer, PROMPT, answer["choices"][0]["token_ids"])
        assert nixl.pull_refusal(held, [*PROMPT, *reply_ids(PROMPT, 4), 9]) is None


async def test_an_offer_that_d_refuses_is_released_at_p(pool):
    """A client that leaves between P and D asks D with nonsense, and P's blocks are free."""
    async with FakeEngine() as p, FakeEngine() as d:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4}
        given = nixl.read_prefilled((await post(pool, p, nixl.prefill_body(body))).json())
        assert len(p.held) == 1
        assert (await post(pool, d, nixl.release_body(given))).head.status == 404
        while p.held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_dishonest_d_computes_itself(pool):
    """It answers well, moves nothing, and only its counters give it away."""
    async with FakeEngine() as p, FakeEngine(honest_handoff=False) as d:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4}
        given = nixl.read_prefilled((await post(pool, p, nixl.prefill_body(body))).json())
        await post(pool, d, nixl.decode_body(body, given))

        assert await metric(pool, d, "vllm:nixl_bytes_transferred_sum") == 0
        computed = 'vllm:prompt_tokens_by_source_total{model_name="fake",engine="0",source="local_c'
        assert await metric(pool, d, computed) == 65


async def test_slots_serve_in_order_and_never_before_their_time(pool):
    """Two slots, four requests: a later one starts when an earlier one has ended."""
    async with FakeEngine(slots=2, service=Service(0.04, 0.01)) as engine:
        await asyncio.gather(*(ask(pool, engine, PROMPT, 3) for _ in range(4)))
        served = engine.served

    earliest_end = min(s.sent_at_s[-1] for s in served)
    assert all(s.sent_at_s[-1] >= s.received_at_s + 0.059 for s in served)
    assert [s.sent_at_s[0] > earliest_end for s in served] == [False, False, True, True]


@pytest.mark.parametrize(
    "fault", [Fault(FaultKind.CLOSE), Fault(FaultKind.BREAK, after_tokens=2)], ids=str
)
async def test_broken_connections(pool, fault):
    """Before anything, and in the middle of a stream."""
    async with FakeEngine(faults=every(1, fault)) as engine:
        with pytest.raises(BrokenError):
            await ask(pool, engine, PROMPT, stream=True)


@pytest.mark.parametrize(
    ("fault", "tokens", "ended"),
    [
        (Fault(FaultKind.END_SILENTLY, after_tokens=2), 2, False),
        (Fault(FaultKind.ERROR_EVENT, after_tokens=2), 2, False),
        (Fault(FaultKind.STOP_SHORT, after_tokens=2), 2, True),
    ],
    ids=str,
)
async def test_streams_that_end_wrongly(pool, fault, tokens, ended):
    """Each is HTTP 200 and only the stream tells."""
    async with FakeEngine(faults=every(2, fault, of=[1])) as engine:
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
        replies = []
        for _ in range(2):
            reply = Reply()
            reply.feed((await post(pool, engine, body)).body, 0.0)
            replies.append((len(reply.text), reply.ended))

    assert replies == [(4, True), (tokens, ended)]


async def test_a_client_that_leaves_frees_its_slot(pool):
    """The next request is served."""
    async with FakeEngine(slots=1, service=lambda g: Service(0 if g.index else 30)) as engine:
        with pytest.raises(BrokenError):
            await pool.fetch(
                Origin.parse(engine.url),
                Request.json("/v1/completions", {"prompt": PROMPT}),
                timeout_s=0.05,
            )
        await ask(pool, engine, PROMPT)

        assert (engine.cancelled, engine.running) == (1, 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "other", "prompt": [1]}, 404),
        ({"prompt": []}, 400),
        ({"prompt": [1], "max_tokens": 999}, 400),
        ({"prompt": [1], "max_tokens": "many"}, 400),
        ({"prompt": [1], "max_tokens": 0}, 400),
        ({"prompt": [1], "max_completion_tokens": [4]}, 400),
        ({"prompt": [1], "stream_options": "x"}, 400),
        ({"prompt": [1], "stream": {}}, 400),
        ({"prompt": [1], "cache_salt": 5}, 400),
        ({"prompt": [1], "kv_transfer_params": [1]}, 400),
        ({"prompt": [], "kv_transfer_params": "x"}, 400),
        ({"prompt": [], "kv_transfer_params": {"do_remote_prefill": True}}, 400),
        ({"prompt": [1], "model": ["fake"]}, 400),
        ({"prompt": {"a": 1}}, 400),
        ({"prompt": [[[1]]]}, 400),
        ({"prompt": ["a", 1]}, 400),
        ({}, 400),
        ([1], 400),
        ("hello", 400),
        (None, 400),
    ],
)
async def test_bad_requests_are_refused_in_vllms_form(pool, body, status):
    """``error.message`` is what clients read."""
    async with FakeEngine(max_model_len=100) as engine:
        response = await post(pool, engine, body)

    assert response.head.status == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        {"role": "user"},
        ["hello"],
        [None],
        [[1]],
        [{"content": "no role"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": 5}],
    ],
)
async def test_what_is_no_chat_is_refused_and_the_connection_lives(pool, messages):
    """400 in vLLM's form; the next request on the same connection is served."""
    async with FakeEngine() as engine:
        response = await post(pool, engine, {"messages": messages}, "/v1/chat/completions")
        after = await ask(pool, engine, PROMPT)

    assert response.head.status == 400
    assert response.json()["error"]["message"]
    assert after["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "params",
    [
        {"remote_engine_id": "x"},
        {"remote_engine_id": 5, "remote_host": "127.0.0.1", "remote_port": "none"},
        {"remote_prefill_cached_tokens": "many"},
    ],
)
async def test_a_hand_off_that_names_nobody_is_computed_here(pool, params):
    """As vLLM does with parameters it cannot use."""
    async with FakeEngine() as engine:
        reply = await ask(pool, engine, PROMPT, kv_transfer_params=params)
        pulled = await metric(pool, engine, "vllm:nixl_bytes_transferred_sum")

    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert pulled == 0


@pytest.mark.parametrize("word", ["t²", "t" + "1" * 5000, "t٣"])
def test_every_word_has_an_id(word):
    """Digits that are no numbers of the toy vocabulary are words."""
    assert all(0 <= i < 4096 for i in encode(word))


async def test_reset_prefix_cache_is_refused_while_requests_run(pool):
    """As vLLM: success false; afterwards the cache is cold."""
    async with FakeEngine(service=Service(0.05)) as engine:
        origin = Origin.parse(engine.url)
        reset = Request("POST", "/reset_prefix_cache")
        running = asyncio.create_task(ask(pool, engine, PROMPT))
        while not engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (await pool.fetch(origin, reset)).json() == {"success": False}
        await running
        assert (await pool.fetch(origin, reset)).json() == {"success": True}
        cached = (await ask(pool, engine, PROMPT))["usage"]["prompt_tokens_details"]

    assert cached == {"cached_tokens": 0}


async def test_it_says_what_it_is_as_vllm_does():
    """A probe of a cluster's node reads model, longest context and block size."""
    async with FakeEngine(model="m", max_model_len=777, block_size=32) as engine:
        facts = await asyncio.to_thread(probe, Node("r0", Role.R, engine.url))

    assert (facts.model, facts.max_model_len, facts.block_size) == ("m", 777, 32)
