"""An engine that answers at once, in a process of its own: what a client adds is all there is.

``python -m ppdbench.testing.instant`` prints its URL and serves until its standard input closes,
so that it dies with whoever started it. A stream has as many chunks as ``max_tokens`` says, each
given to the kernel by itself.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import lru_cache
from typing import cast

import httptools
import orjson
import uvloop

from ppdbench.testing.tokens import reply_ids

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_MAX_TOKENS = re.compile(rb'"max_tokens":(\d+)')


def _frame(document: dict[str, object] | None) -> bytes:
    data = b"[DONE]" if document is None else orjson.dumps(document)
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


@lru_cache
def _writes(count: int) -> tuple[bytes, ...]:
    """The writes of an answer of ``count`` tokens, as long as vLLM's chunks are."""
    base = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "instant"}
    frames = [
        _frame(
            {
                **base,
                "choices": [
                    {
                        "index": 0, "text": f" t{token}", "logprobs": None,
                        "finish_reason": "length" if i == count - 1 else None,
                        "stop_reason": None, "token_ids": [token],
                    }
                ],
            }
        )
        for i, token in enumerate(reply_ids([1], count))
    ]  # fmt: skip
    usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
    usage_frame = _frame({**base, "choices": [], "usage": usage})
    frames[0] = _HEAD + frames[0]
    frames[-1] += usage_frame + _frame(None) + b"0\r\n\r\n"
    return tuple(frames)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._count = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without being asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        match = _MAX_TOKENS.search(body)
        if match:
            self._count = int(match[1])

    def on_message_complete(self) -> None:
        assert self._transport is not None
        if self._parser.get_method() == b"GET":
            self._transport.write(_NOT_FOUND)
            return
        for write in _writes(self._count):
            self._transport.write(write)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201
    closed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), closed.set)  # nobody writes to it: readable is closed
    await closed.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
