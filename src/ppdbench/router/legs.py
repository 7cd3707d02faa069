"""The two kinds of answer a turn waits for: P's, kept whole, and the one passed to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from ppdbench.http.client import Exchange
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Head
from ppdbench.http.server import Responder
from ppdbench.router.answer import (
    NOTHING,
    Counted,
    StreamReader,
    carries_token,
    is_cut_short,
    read_whole,
    speaks_of_usage,
    without_usage,
)
from ppdbench.router.history import Answer
from ppdbench.router.nodes import Upstream
from ppdbench.router.wire import error_event, response_lines

TAIL_LIMIT_BYTES = 1024 * 1024
"""A stream's unfinished event is held back up to here, so that none is ever cut in the middle."""

_ERROR_EVENT = b'data: {"error":'
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_DONE = tuple(b"data: [DONE]" + end for end in _EVENT_ENDS)


class WholeLeg:
    """Collects an answer and hands it over; ``began`` says whether its head has come."""

    __slots__ = ("_failed", "_head", "_parts", "_whole", "at_s")

    def __init__(
        self, whole: Callable[[Head, bytes], None], failed: Callable[[HttpError], None]
    ) -> None:
        self._whole = whole
        self._failed = failed
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self.at_s = 0.0

    @property
    def began(self) -> bool:
        return self._head is not None

    def on_head(self, head: Head, at_s: float) -> None:
        self._head = head
        self.at_s = at_s

    def on_body(self, data: bytes, at_s: float) -> None:
        self._parts.append(data)
        self.at_s = at_s

    def on_end(self, at_s: float) -> None:  # noqa: ARG002
        assert self._head is not None
        self._whole(self._head, b"".join(self._parts))

    def on_failure(self, error: HttpError, at_s: float) -> None:  # noqa: ARG002
        self._failed(error)


class AnswerOwner(Protocol):
    """Hears once how an answer ended.

    ``known`` comes before the last bytes go out: the next turn may be there, at another worker, as
    soon as the client has them.
    """

    def known(self) -> None:
        """It is all here, and will now reach the client whole."""
        ...

    def answered(self) -> None:
        """It reached the client whole."""
        ...

    def broke(self, error: HttpError) -> None:
        """It did not come, or not whole."""
        ...

    def break_off(self) -> None:
        """It cannot be passed on for a fault of ours, which the loop logs."""
        ...


class AnswerLeg(Struct, eq=False):
    """Passes an answer on: a stream event by event, anything else when it is whole.

    Nothing reaches the client before the first byte of a body has come, so until ``began`` the
    turn may be tried elsewhere. ``first_at_s`` and ``last_at_s`` are the reads that brought the
    first and the last token. ``strip_usage`` withholds the counts that only the router asked for.
    ``failed_inside`` says that the node told of an error in its answer, or just stopped;
    ``said_done`` that the client has a stream's ``[DONE]``, behind which nothing is missing.
    """

    _owner: AnswerOwner
    _responder: Responder
    _node: Upstream
    _receipt: bytes
    _field: str
    _strip_usage: bool
    _reader: StreamReader | None = None
    _body: list[bytes] = []  # each leg gets one of its own
    _held: bytes = b""
    _torn: bool = False
    exchange: Exchange | None = None
    head: Head | None = None
    answer: Answer | None = None
    counted: Counted = NOTHING
    began: bool = False
    failed_inside: bool = False
    said_done: bool = False
    streaming: bool = False
    at_s: float = 0.0
    first_at_s: float | None = None
    last_at_s: float | None = None

    def __repr__(self) -> str:
        return f"<AnswerLeg of {self._node.name}, status {self.status}>"

    @property
    def status(self) -> int:
        return 0 if self.head is None else self.head.status

    @property
    def whole(self) -> bytes:
        """The body of an unstreamed answer."""
        return b"".join(self._body)

    # Sink

    def on_head(self, head: Head, at_s: float) -> None:
        self.head = head
        self.at_s = at_s
        kind = head.get(b"content-type")
        self.streaming = kind is not None and kind.lower().startswith(b"text/event-stream")
        if self.streaming:
            self._reader = StreamReader(self._field)

    def on_body(self, data: bytes, at_s: float) -> None:
        self.at_s = self._node.progress_at_s = at_s
        if not self.streaming:
            self._body.append(data)
            return
        if self.exchange is not None and self.exchange.whole:
            self._held += data  # ``on_end`` follows at once, and all goes out in one write
            return
        if self._held or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
        if data:
            try:
                self._pass_on(data, at_s)
            except Exception:
                self._owner.break_off()
                raise

    def on_end(self, at_s: float) -> None:
        try:
            if self.streaming:
                self._end_stream(at_s)
            else:
                self._send_whole(at_s)
            self._owner.answered()
        except Exception:
            self._owner.break_off()
            raise

    def on_failure(self, error: HttpError, at_s: float) -> None:  # noqa: ARG002
        self._owner.broke(error)

    def fail_inside(self, message: str, kind: str, status: int) -> None:
        """Say inside the stream that it will not go on; an answer already cut off is dropped."""
        if self.streaming and not self._responder.gone:
            begun = b"\n\n" if self._torn else b""
            self._responder.end(begun + error_event(message, kind, status))
        else:
            self._responder.abort()

    def end_here(self) -> None:
        """End the stream as it is: the node only left its last chunk unsaid."""
        self._responder.end()

    def _pass_on(self, data: bytes, at_s: float) -> None:
        self._take(data, at_s)
        done = data.endswith(_DONE)
        if done:
            self._know()
        self._send(data)
        self.said_done |= done
        if self._responder.congested and self.exchange is not None:
            self.exchange.pause()

    def _take(self, data: bytes, at_s: float) -> None:
        if self.first_at_s is None:
            if carries_token(data):
                self.first_at_s = self.last_at_s = at_s
        elif b'"choices":[{' in data or carries_token(data):
            self.last_at_s = at_s
        if _ERROR_EVENT in data:
            self.failed_inside = True
        assert self._reader is not None
        self._reader.feed(data)

    def _send(self, data: bytes, *, last: bool = False) -> None:
        if self._strip_usage and speaks_of_usage(data):
            data = without_usage(data)
        if not self.began:
            self._begin(data, last=last)
        elif last:
            self._responder.end(data)
        else:
            self._responder.write(data)

    def _begin(self, data: bytes, *, last: bool) -> None:
        assert self.head is not None
        self.began = True
        self._responder.on_writable = self._go_on
        lines = self._receipt + response_lines(self.head)
        self._responder.start(self.head.status, (), lines, data, last=last)

    def _go_on(self) -> None:
        if self.exchange is not None:
            self.exchange.resume()

    def _whole_events(self, data: bytes) -> bytes:
        """The part of what is held and ``data`` up to the last event's end; the rest is held."""
        data = self._held + data
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
        if end:
            self._torn = False
        elif len(data) > TAIL_LIMIT_BYTES:
            self._torn = True
            end = len(data)
        self._held = data[end:]
        return data[:end]

    def _end_stream(self, at_s: float) -> None:
        held, self._held = self._held, b""
        self._take(held, at_s)
        self._know()
        self._send(held, last=True)

    def _know(self) -> None:
        """Once: at ``[DONE]``, where clients stop to read, or else at the end."""
        if self.answer is not None:
            return
        assert self._reader is not None
        self.answer = self._reader.end()
        self.counted = self._reader.counted
        self.failed_inside |= self.status == 200 and not self._reader.ended_well
        self._owner.known()

    def _send_whole(self, at_s: float) -> None:
        assert self.head is not None
        self.first_at_s = self.last_at_s = at_s
        body = self.whole
        if self.head.status == 200:
            self.answer, self.counted = read_whole(body)
            self.failed_inside = is_cut_short(body)
            self._owner.known()
        self.began = True
        self._responder.send(self.head.status, body, (), self._receipt + response_lines(self.head))
