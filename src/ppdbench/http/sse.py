"""Server-sent events from any split of bytes.

The rules are those of the HTML standard, section 9.2.6: lines end with LF, CRLF or CR, a blank
line dispatches, a colon first is a comment, one space after the colon is dropped, several ``data``
lines are joined by LF, a byte order mark at the start is dropped. Data stays bytes: a character
cut in half is whole again before anybody decodes it.
"""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """Feed bytes, get the data of each event that is whole. Events without data are dropped."""

    __slots__ = ("_after_cr", "_buffer", "_data", "_started")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._started = False

    @property
    def pending(self) -> bool:
        """Whether bytes of an event that is not whole are held."""
        return bool(self._buffer or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ``chunk`` completes, in order."""
        if not chunk:
            return []
        if self._started and not self._buffer and not self._data and not self._after_cr:
            events = _whole_events(chunk)
            if events is not None:
                return events
        return self._feed_any(chunk)

    def _feed_any(self, chunk: bytes) -> list[bytes]:
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        text = self._buffer + chunk
        if not self._started:
            if _BYTE_ORDER_MARK.startswith(text):
                self._buffer = text
                return []
            self._started = True
            text = text.removeprefix(_BYTE_ORDER_MARK)
        # A CR at the end ends its line now; the LF that may follow belongs to it.
        self._after_cr = text.endswith(b"\r")
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = lines.pop()
        return [event for line in lines if (event := self._take_line(line)) is not None]

    def _take_line(self, line: bytes) -> bytes | None:
        """The event's data when ``line`` ends an event."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data = []
        return event


def _whole_events(chunk: bytes) -> list[bytes] | None:
    """The short way for what every engine sends: whole one-line LF events and nothing else."""
    if not chunk.startswith(b"data: ") or not chunk.endswith(b"\n\n") or b"\r" in chunk:
        return None
    events = chunk[6:-2].split(b"\n\ndata: ")
    if any(b"\n" in event for event in events):
        return None
    return events
