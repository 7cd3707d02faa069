"""The router before fake engines: routes, receipts, pass-through."""

from __future__ import annotations

import pytest

from ppdbench.http.messages import Origin, Request

USER = [{"role": "user", "content": "hello there, how are you today?"}]


def follow_up(messages, reply, text="and what now?"):
    return [
        *messages,
        {"role": "assistant", "content": reply.text()},
        {"role": "user", "content": text},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_turn_1_goes_remote_and_later_turns_as_the_policy_says(bench_for, stream):
    """Turn 1 asks P and then D; under ``local`` Turn 2 asks D alone, and the same one."""
    bench = await bench_for("1P_2D", policy="local")

    first = await bench.chat(USER, stream=stream)
    second = await bench.chat(follow_up(USER, first), stream=stream)

    assert (first.status, first.route, first.reason) == (200, "remote", "turn1")
    assert (second.status, second.route, second.reason) == (200, "local", "policy")
    assert first.node == second.node
    assert len(bench.engines["p0"].served) == 1
    assert len(bench.engines[first.node].served) == 2
    assert bench.engines[first.node].served[1].cached_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_by_token_ids_are_turns_of_one_conversation(bench_for, stream):
    """Raw token prompts have no messages; the history is found by its own beginning."""
    bench = await bench_for("1P_2D", policy="local")
    prompt = list(range(100, 180))
    body = {"model": "fake", "max_tokens": 4, "stream": stream}

    first = await bench.post("/v1/completions", body | {"prompt": prompt})
    longer = [*prompt, 7, 8, 9, 10, 11, 12]
    second = await bench.post("/v1/completions", body | {"prompt": longer})

    assert (first.route, first.reason) == ("remote", "turn1")
    assert (second.route, second.node) == ("local", first.node)


async def test_one_cache_key_for_many_users_does_not_pin_them_to_one_node(bench_for):
    """Some clients send one key per application: a first turn under a known name is a new one."""
    bench = await bench_for("1P_2D", policy="local")
    nodes = []
    for user in range(6):
        messages = [{"role": "user", "content": f"user {user} asks something of its own"}]
        body = {"model": "fake", "max_tokens": 4, "messages": messages, "prompt_cache_key": "app"}
        nodes.append((await bench.post("/v1/chat/completions", body)).node)

    assert sorted(nodes) == ["d0"] * 3 + ["d1"] * 3


async def test_users_under_one_cache_key_keep_their_own_homes(bench_for):
    """Their histories tell them apart, so later turns stay where each user's KV is."""
    bench = await bench_for("1P_2D", policy="local")
    talks = [[{"role": "user", "content": f"user {user} asks"}] for user in range(4)]
    seen = []
    for _ in range(3):
        for talk in talks:
            reply = await bench.chat(talk, prompt_cache_key="app")
            seen.append((reply.reason, reply.node))
            talk += [
                {"role": "assistant", "content": reply.text()},
                {"role": "user", "content": "on"},
            ]

    assert [reason for reason, _ in seen] == ["turn1"] * 4 + ["policy"] * 8
    assert [node for _, node in seen] == ["d0", "d1"] * 6


async def test_a_stream_is_passed_on_byte_for_byte(bench_for):
    """Streaming through the router gives the bytes that the engine alone gives."""
    bench = await bench_for("1R", policy="local")
    body = {"model": "fake", "messages": USER, "max_tokens": 6, "stream": True}
    direct = await bench.pool.fetch(
        Origin.parse(bench.engines["r0"].url),
        Request.json("/v1/chat/completions", body, ((b"x-request-id", b"same"),)),
    )
    routed = await bench.post("/v1/chat/completions", body, x_request_id="same")

    assert routed.route == "replica"
    assert _shape(routed.body) == _shape(direct.body)


def _shape(body: bytes) -> bytes:
    import re

    return re.sub(rb'"created":\d+', b'"created":0', body)


async def test_gauges_return_to_zero(bench_for):
    """What a turn took, it gives back."""
    bench = await bench_for("1P_1D", policy="remote")

    for _ in range(3):
        await bench.chat(USER)

    names = ("in_flight", "running:d0", "prefill_tokens:p0")
    assert [bench.total(name) for name in names] == [0, 0, 0]
    assert bench.total("outcome:ok") == 3


async def test_the_control_path_answers_on_the_same_port(bench_for):
    """Models, health, metrics and decisions come from the port of the data path."""
    bench = await bench_for("1P_1D", policy="remote")
    await bench.chat(USER)

    models, health = await bench.get("/v1/models"), await bench.get("/health")
    metrics, decisions = await bench.get("/metrics"), await bench.get("/ppd/decisions")
    state, page = await bench.get("/ppd/state"), await bench.get("/ui")

    assert models.json()["data"][0]["id"] == "fake"
    assert health.status == 200
    assert b'ppd_turns_total{reason="turn1",route="remote"} 1.0' in metrics.body
    assert decisions.json()["decisions"][0]["reason"] == "turn1"
    assert [node["name"] for node in state.json()["nodes"]] == ["p0", "d0"]
    assert b"<h1>ppd router</h1>" in page.body


async def test_an_http_1_0_client_gets_a_stream_without_chunks(bench_for):
    """It knows no chunked encoding: the close ends its answer."""
    import asyncio

    bench = await bench_for("1R")
    wire = Request.json(
        "/v1/chat/completions", {"model": "fake", "messages": USER, "max_tokens": 3, "stream": True}
    ).render(bench.origin)
    reader, writer = await asyncio.open_connection(bench.origin.host, bench.origin.port)
    writer.write(wire.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    raw = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_users_under_one_cache_key_are_several_to_a_router_that_has_just_begun(bench_for):
    """Their histories are not known, and the first to come does not stand for the others."""
    bench = await bench_for("1P_2D", policy="local")
    for name in range(4):
        talk = [{"role": "user", "content": f"user {name} asks"},
                {"role": "assistant", "content": f"to {name}"},
                {"role": "user", "content": "on"}]  # fmt: skip
        reply = await bench.chat(talk, prompt_cache_key="app")
        assert reply.reason == "cold"

    receipts = (await bench.get("/ppd/decisions")).json()["decisions"]

    assert len({receipt["conversation"] for receipt in receipts}) == 4
    assert sorted(receipt["node"] for receipt in receipts) == ["d0", "d0", "d1", "d1"]


async def test_only_a_stream_has_a_ttft(bench_for):
    """An unstreamed answer comes whole: when its first token was there nobody knows."""
    bench = await bench_for("1P_1D", policy="local")
    for stream in (False, True):
        await bench.chat([{"role": "user", "content": "hello"}], stream=stream)

    streamed, whole = (await bench.get("/ppd/decisions")).json()["decisions"]
    metrics = (await bench.get("/metrics")).body.decode()

    assert streamed["ttft_s"] > 0
    assert (whole["ttft_s"], whole["tpot_s"], whole["outcome"]) == (None, None, "ok")
    assert "ppd_ttft_seconds_count 1.0" in metrics
    assert "ppd_tpot_seconds_count 1.0" in metrics


@pytest.mark.parametrize("headers", [{}, {"x_session_id": "s"}], ids=["found", "named"])
async def test_a_conversation_keeps_its_p_as_in_a_sweep(bench_for, headers):
    """Its history is in that P's cache; another one takes over only with that much less to do."""
    bench = await bench_for("2P_1D", policy="threshold:4")
    p0 = bench.router.upstreams["p0"]
    talk = []
    for words, more_on_p0 in (
        ("t1 " * 600, 1), ("t2 " * 100, 0), ("t3 t3", 0), ("t4 " * 100, 0), ("t5 " * 100, -10_000),
    ):  # fmt: skip
        talk.append({"role": "user", "content": words})
        p0.prefill_tokens.add(more_on_p0)
        reply = await bench.chat(talk, headers=headers)
        p0.prefill_tokens.add(-more_on_p0)
        talk.append({"role": "assistant", "content": reply.text()})

    receipts = (await bench.get("/ppd/decisions")).json()["decisions"][::-1]
    assert [it["prefill_node"] for it in receipts] == ["p1", "p1", None, "p1", "p0"]
    assert [served.cached_tokens > 500 for served in bench.engines["p1"].served] == [
        False, True, True,
    ]  # fmt: skip
