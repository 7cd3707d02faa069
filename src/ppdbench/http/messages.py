"""Origins, requests and response heads: plain values, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson
from msgspec import Struct

from ppdbench.core.errors import UsageError

Headers = tuple[tuple[bytes, bytes], ...]
JSON_TYPE = (b"content-type", b"application/json")
DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Where to connect. ``path`` is prefixed to every target; it has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read ``http://host:port/path``.

        Raises:
            UsageError: another scheme, no host, or a port that is no number.
        """
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise UsageError(f"{url!r} is no URL of a server; write it as http://127.0.0.1:8000")
        try:
            port = parts.port or DEFAULT_PORTS[parts.scheme]
        except ValueError:
            raise UsageError(f"{url!r}: the port must be a number below 65536") from None
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port as the ``host`` header wants them; IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """A request whole in memory. ``host`` and ``content-length`` are added when it is sent.

    Neither a key nor a prompt is in its ``repr``, so none comes into a log.
    """

    method: str
    target: str
    headers: Headers = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)

    @classmethod
    def json(
        cls, target: str, document: object, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> Request:
        """A POST of ``document``."""
        return cls("POST", target, (JSON_TYPE, *headers), orjson.dumps(document))

    def render(self, origin: Origin) -> bytes:
        """The bytes on the wire."""
        lines = [
            f"{self.method} {origin.path}{self.target} HTTP/1.1".encode(),
            b"host: " + origin.authority.encode(),
            *(name + b": " + value for name, value in self.headers),
        ]
        if self.body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


class Head(Struct, frozen=True):
    """Status line and headers of an answer, names as the server wrote them."""

    status: int
    reason: bytes
    headers: Headers

    def get(self, name: bytes) -> bytes | None:
        """The first header of that name, in any case."""
        wanted = name.lower()
        for key, value in self.headers:
            if key.lower() == wanted:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    head: Head
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.head.status < 300

    def json(self) -> Any:  # noqa: ANN401  (JSON is whatever it is)
        """The body as JSON; raises ``ValueError`` when it is none."""
        return orjson.loads(self.body)
