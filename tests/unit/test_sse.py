"""Server-sent events and replies, whatever way the bytes are cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdbench.http.reply import Reply
from ppdbench.http.sse import SseParser

EVENTS = [
    b'{"a": 1}',
    '{"text": "grüße 漢字 🙂"}'.encode(),
    b"two\nlines",
    b"",
    b"[DONE]",
]


def encode(events, ending, *, space, comment):
    lines = []
    for event in events:
        if comment:
            lines += [b": keep-alive", b""]
        lines += [b"event: x"] if comment else []
        lines += [b"data:" + (b" " if space else b"") + part for part in event.split(b"\n")]
        lines.append(b"")
    return ending.join(lines) + ending


STREAMS = {
    (ending, space, comment): encode(EVENTS, ending, space=space, comment=comment)
    for ending in (b"\n", b"\r\n", b"\r")
    for space in (True, False)
    for comment in (True, False)
}


def parse(pieces):
    parser = SseParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events, parser.pending


@pytest.mark.parametrize("stream", STREAMS.values(), ids=map(str, STREAMS))
def test_a_stream_cut_at_any_byte_gives_the_same_events(stream):
    """Two pieces at every cut, and one byte at a time, under all line endings."""
    cuts = [[stream[:cut], stream[cut:]] for cut in range(len(stream) + 1)]
    cuts.append([stream[i : i + 1] for i in range(len(stream))])

    assert all(parse(pieces) == (EVENTS, False) for pieces in cuts)


@given(
    st.sampled_from(sorted(STREAMS.values())),
    st.lists(st.integers(min_value=0, max_value=400), max_size=12),
)
def test_a_stream_cut_anywhere_many_times_gives_the_same_events(stream, cuts):
    """Any split of bytes, several events per read included."""
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]

    assert parse(pieces) == (EVENTS, False)


def test_a_byte_order_mark_and_unknown_fields_are_dropped():
    """The mark stands only at the very start; id, retry and unknown fields carry no data."""
    stream = b"\xef\xbb\xbfdata: x\nid: 1\nretry: 5\nnonsense\n\ndata\n\n"

    for cut in range(len(stream)):
        assert parse([stream[:cut], stream[cut:]]) == ([b"x", b""], False)


def test_an_event_that_is_not_whole_is_pending():
    """A stream that stops in an event is told apart from one that ends between events."""
    assert parse([b"data: x\n\ndata: y\n"]) == ([b"x"], True)
    assert parse([b"data: x\n\ndata: y"]) == ([b"x"], True)


def chunk(**choice):
    return {"choices": [{"index": 0, "finish_reason": None, **choice}]}


def read(*documents, done=True):
    reply = Reply()
    for at, document in enumerate(documents):
        reply.feed(b"data: " + orjson.dumps(document) + b"\n\n", float(at))
    if done:
        reply.feed(b"data: [DONE]\n\n", float(len(documents)))
    return reply


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def test_a_role_is_no_token_and_usage_is_none_either():
    """TTFT ends at the first text, not at the role chunk; the usage chunk has empty choices."""
    reply = read(
        chunk(delta={"role": "assistant", "content": ""}),
        chunk(delta={"content": "a"}),
        chunk(delta={"content": "b"}),
        chunk(delta={}, finish_reason="length"),
        {"choices": [], "usage": USAGE},
    )

    assert (reply.first_token_at_s, reply.last_token_at_s) == (1.0, 2.0)
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == (9, 2, 4)
    assert reply.exact_token_at_s == [1.0, 2.0]
    assert reply.ended
    assert not reply.counts_estimated


def test_usage_on_every_chunk_counts_the_tokens_of_each():
    """A chunk that holds two tokens gives two equal instants."""
    reply = read(
        {**chunk(text="a"), "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
        {**chunk(text="bc"), "usage": {"prompt_tokens": 3, "completion_tokens": 3}},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}},
    )

    assert reply.exact_token_at_s == [0.0, 1.0, 1.0]
    assert reply.cached_tokens is None


def test_without_usage_counts_are_marked_estimated():
    """Nobody counted, so one token per chunk is a guess and says so."""
    reply = read(chunk(text="a"), chunk(text="b"))

    assert reply.output_tokens == 2
    assert reply.counts_estimated
    assert reply.exact_token_at_s == []  # a gap between chunks is no gap between tokens


def test_chunks_that_hold_an_unknown_number_of_tokens_give_no_instants():
    """Five tokens in two chunks: the gaps between tokens are unknown, so none are claimed."""
    reply = read(
        chunk(text="ab"),
        chunk(text="cde"),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 5}},
    )

    assert reply.exact_token_at_s == []
    assert (reply.first_token_at_s, reply.last_token_at_s, reply.output_tokens) == (0.0, 1.0, 5)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_tokens_but_no_answer(field):
    """TTFT is the first thought; the first answer is apart."""
    reply = read(chunk(delta={field: "hm"}), chunk(delta={"content": "so"}))

    assert (reply.first_token_at_s, reply.answer_at_s) == (0.0, 1.0)
    assert reply.text == ["so"]


def test_a_reply_of_tool_calls_alone_has_a_first_token():
    """A model that only calls a tool did answer."""
    call = {"index": 0, "function": {"name": "f", "arguments": ""}}
    reply = read(chunk(delta={"role": "assistant"}), chunk(delta={"tool_calls": [call]}))

    assert reply.first_token_at_s == 1.0


def test_ids_are_tokens_even_without_text():
    """Half a character has an id and no text yet."""
    reply = read(chunk(text="", token_ids=[5]), chunk(text="é", token_ids=[6, 7]))

    assert reply.exact_token_at_s == [0.0, 1.0, 1.0]
    assert reply.token_ids == [5, 6, 7]
    assert not reply.counts_estimated


def test_a_stream_without_reason_or_done_has_not_ended():
    """A connection that closes cleanly after some tokens is no success."""
    assert not read(chunk(text="a"), done=False).ended
    assert read(chunk(text="a", finish_reason="stop"), done=False).ended


def test_an_error_event_is_a_failure_with_the_servers_words():
    """HTTP 200 says nothing about what comes later in a stream."""
    reply = read(chunk(text="a"), {"error": {"message": "out of blocks"}})

    assert not reply.ended
    assert reply.error == "the server reported: out of blocks"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_a_failure(reason):
    """An aborted request ends with HTTP 200, tokens, a finish reason and [DONE] all the same."""
    reply = read(chunk(text="a"), chunk(text="b", finish_reason=reason))

    assert not reply.ended
    assert repr(reason) in reply.error


def test_nonsense_in_an_event_is_a_failure_not_an_exception():
    """A proxy's HTML in the middle of a stream must not end the run."""
    reply = Reply()
    reply.feed(b"data: <html>\n\ndata: [1]\n\n", 0.0)

    assert not reply.ended


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [None]},
        {"choices": "x"},
        {"choices": {"0": {"text": "a"}}},
        {"choices": [{"delta": "hi"}]},
        {"choices": [{"text": "a", "token_ids": 7}]},
        {"choices": [], "usage": 5},
        {"choices": [], "usage": {"completion_tokens": "12"}},
        {"choices": [], "usage": {"prompt_tokens": "12"}},
        {"choices": [], "usage": {"prompt_tokens_details": "x"}},
    ],
)
def test_json_of_another_shape_is_a_failure_not_an_exception(event):
    """What raises in a reader ends up in the loop's log, not in the turn's record."""
    reply = read(chunk(text="a"), event)

    assert not reply.ended
    assert "no completion" in reply.error


def test_a_null_count_takes_no_count_back():
    """Some servers end with a usage of nulls."""
    counted = {**chunk(text="a"), "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    reply = read(counted, {"choices": [], "usage": {"prompt_tokens": None}})

    assert (reply.prompt_tokens, reply.output_tokens) == (3, 1)


def test_a_null_error_is_none():
    """Servers that send every field send this one, too."""
    counted = {"choices": [], "error": None, "usage": {"completion_tokens": 1}}

    assert read(chunk(text="a"), counted).ended


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"text": ""}], "error": {"message": "out of blocks"}},
        {"object": "error", "message": "out of blocks", "code": 400},
    ],
)
def test_an_error_beside_choices_or_at_the_top_is_a_failure(event):
    """Engines differ in where they put it; [DONE] follows all the same."""
    reply = read(chunk(text="a"), event)

    assert not reply.ended
    assert "out of blocks" in reply.error


def test_a_whole_answer_is_read_like_a_stream():
    """An unstreamed answer has its tokens, counts and hand-off fields, at one instant."""
    reply = Reply()
    document = {
        **chunk(text="ab", token_ids=[1, 2]),
        "usage": USAGE,
        "kv_transfer_params": {"x": 1},
    }
    reply.feed_whole(orjson.dumps(document), 3.0)

    assert reply.ended
    assert reply.kv_transfer_params == {"x": 1}
    assert reply.exact_token_at_s == [3.0, 3.0]


RECORDED = sorted((Path(__file__).parents[1] / "data" / "streams").glob("*.sse"))
"""Answers of vLLM 0.32.0 to twelve-token requests, as they came off the wire."""


def state(pieces):
    reply = Reply()
    for piece in pieces:
        reply.feed(piece, 1.0)
    return {
        name: getattr(reply, name)
        for name in (
            "prompt_tokens", "completion_tokens", "cached_tokens", "output_tokens", "token_ids",
            "text", "token_at_s", "finish_reason", "done", "ended", "error", "counts_estimated",
        )
    }  # fmt: skip


def test_the_recorded_streams_are_here():
    """Six kinds of answer: text and chat, with and without ids and usage."""
    assert len(RECORDED) == 6


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_recorded_stream_cut_at_every_byte_reads_the_same(path, ending):
    """Nothing that a network does to a real answer changes what is read from it."""
    stream = path.read_bytes().replace(b"\n", ending)
    whole = state([stream])

    assert whole["ended"]
    assert whole["output_tokens"] == len(whole["token_at_s"]) == 12
    step = 1 if ending == b"\n" else 7
    for cut in range(0, len(stream), step):
        assert state([stream[:cut], stream[cut:]]) == whole
    assert state([stream[i : i + 1] for i in range(len(stream))]) == whole


@pytest.mark.parametrize(
    ("name", "prompt", "cached", "ids", "estimated"),
    [
        ("completion-ids", 120, 0, 12, False),
        ("completion-continuous", 3, 0, 0, False),
        ("completion-no-usage", None, None, 0, True),
        ("chat-usage", 33, 0, 0, False),
        ("chat-continuous-ids", 33, 0, 12, False),
        ("chat-plain", None, None, 0, True),
    ],
)
def test_what_a_recorded_stream_says(name, prompt, cached, ids, estimated):
    """Counts are the server's where it sent any; what it did not say stays unknown."""
    path = next(path for path in RECORDED if path.stem == name)
    read = state([path.read_bytes()])

    assert (read["prompt_tokens"], read["cached_tokens"]) == (prompt, cached)
    assert (len(read["token_ids"]), read["counts_estimated"]) == (ids, estimated)
