"""Reading an answer's bytes on their way through."""

from __future__ import annotations

from itertools import product

import pytest

from ppdbench.router.answer import StreamReader, read_whole, without_usage

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}'
RUNNING = b'data: {"choices":[{"delta":{"content":"b"}}],"usage":{"completion_tokens":1}}'
QUOTED = rb'data: {"choices":[{"delta":{"content":"say \"usage\" twice"}}]}'
NULL = b'data: {"choices":[],"usage":null}'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
DONE = b"data: [DONE]"


@pytest.mark.parametrize("separator", [b"\n\n", b"\r\n\r\n"])
def test_only_the_counts_alone_are_taken_out(separator):
    """Wherever they stand among whole events, all others stay byte for byte."""
    for events in product([TOKEN, RUNNING, QUOTED, NULL, COUNTS, DONE], repeat=4):
        kept = [event for event in events if event is not COUNTS]

        data = b"".join(event + separator for event in events)

        assert without_usage(data) == b"".join(event + separator for event in kept)


def test_escapes_end_no_text():
    """Quotes and backslashes inside an answer belong to it."""
    reader = StreamReader("content")
    reader.feed(rb'data: {"choices":[{"delta":{"content":"a\"b\\"}}]}' + b"\n\n")
    reader.feed(rb'data: {"choices":[{"delta":{"content": "\\\"c\u00e9\n"}}]}' + b"\n\n")

    assert reader.end().text == 'a"b\\\\"cé\n'


@pytest.mark.parametrize(
    ("piece", "reasoned"),
    [
        (b'{"reasoning_content":"hm"}', True),
        (b'{"reasoning":"hm"}', True),
        (b'{"content":"a","reasoning_content":null}', False),
        (b'{"content":"a","reasoning":""}', False),
        (rb'{"content":"\"reasoning\":\"hm\""}', False),
    ],
)
def test_reasoning_is_noticed_streamed_or_not(piece, reasoned):
    """What was counted for it is no part of the next turn's prompt."""
    reader = StreamReader("content")
    reader.feed(b'data: {"choices":[{"delta":' + piece + b"}]}\n\n")
    reader.feed(TOKEN + b"\n\n")

    assert reader.end().reasoned is reasoned
    assert read_whole(b'{"choices":[{"message":' + piece + b"}]}")[0].reasoned is reasoned
