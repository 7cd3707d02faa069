"""What can go wrong on the wire, apart from what a server answers."""

from __future__ import annotations

from ppdbench.core.errors import EngineError


class HttpError(EngineError):
    """Base of every failure of an exchange. ``got_bytes`` says whether any answer had begun."""

    def __init__(self, message: str, *, got_bytes: bool = False) -> None:
        super().__init__(message)
        self.got_bytes = got_bytes


class ConnectError(HttpError):
    """Nobody listens, the name is unknown, or the connection was not made in time."""


class OutOfFilesError(HttpError):
    """We have no file left for a connection: that says nothing of the peer."""


class BrokenError(HttpError):
    """The peer closed before the answer was whole, or its bytes are no HTTP."""


class CancelledExchangeError(HttpError):
    """We gave the exchange up; its connection is closed so that the server sees it."""
