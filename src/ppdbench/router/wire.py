"""Bytes to and from the nodes: which headers pass, and bodies changed at their end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from ppdbench.core.decision import Decision
from ppdbench.http.messages import Head, Headers
from ppdbench.router.nodes import Upstream

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
        b"content-length",
    }
)  # fmt: skip
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"expect", b"accept-encoding", b"http2-settings"}
"""The answer must come uncompressed, or nobody could count it."""


def request_headers(headers: Headers, *, keep_authorization: bool) -> bytes:
    """A client's headers as lines for a node. Keys that open the router do not travel on."""
    named = _named_by_connection(headers)
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if name not in _NOT_SENT_ON
        and name not in named
        and not name.startswith(b"x-ppd-")
        and (keep_authorization or name != b"authorization")
    )


def response_headers(head: Head) -> Headers:
    """A node's headers as the client gets them."""
    lowered = tuple((name.lower(), value) for name, value in head.headers)
    named = _named_by_connection(lowered)
    return tuple(
        pair
        for pair in lowered
        if pair[0] not in _HOP_BY_HOP and pair[0] not in named and pair[0][:6] != b"x-ppd-"
    )


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Names that a ``connection`` header makes hop-by-hop."""
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            return frozenset(part.strip().lower() for part in value.split(b","))
    return frozenset()


def render(upstream: Upstream, method: str, target: str, headers: bytes, body: bytes) -> bytes:
    """A request on the wire."""
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
        method.encode(),
        upstream.origin.path.encode(),
        target.encode("latin-1"),
        upstream.authority,
        upstream.authorization,
        headers,
        len(body),
        body,
    )


def spliced(raw: bytes, body: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """``raw`` with ``extra`` in it; only written anew where a key of ``extra`` stands in ``body``.

    ``body`` is ``raw`` parsed.
    """
    if not extra:
        return raw
    if not body or any(key in body for key in extra):
        return orjson.dumps({**body, **extra})
    return raw[: raw.rindex(b"}")] + b"," + orjson.dumps(extra)[1:]


def receipt_headers(decision: Decision, node: str) -> Headers:
    """What the client may know about why its turn went where it went."""
    headers = [
        (b"x-ppd-route", decision.route.value.encode()),
        (b"x-ppd-node", node.encode()),
        (b"x-ppd-reason", decision.reason.encode()),
    ]
    if decision.cell is not None:
        headers.append((b"x-ppd-cell", b"%d" % decision.cell))
    if decision.score is not None:
        headers.append((b"x-ppd-score", f"{decision.score:.4f}".encode()))
    return tuple(headers)


def error_body(message: str, kind: str, status: int) -> bytes:
    """An error as the OpenAI API writes it."""
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}
    )


def error_event(message: str, kind: str, status: int) -> bytes:
    """The same inside a stream that has begun."""
    return b"data: " + error_body(message, kind, status) + b"\n\n"


def header_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of lower-case ``name``."""
    return next((value for key, value in headers if key == name), None)
