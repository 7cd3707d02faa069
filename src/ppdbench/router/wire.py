"""Bytes to and from the nodes: which headers pass, and bodies changed at their end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ppdbench.core.decision import Decision
from ppdbench.http.messages import Head, Headers
from ppdbench.router.documents import written
from ppdbench.router.nodes import Upstream

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
        b"content-length",
    }
)  # fmt: skip
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})
_NOT_SENT_ON = _HOP_BY_HOP | {b"host", b"expect", b"accept-encoding", b"http2-settings"}
"""The answer must come uncompressed, or nobody could count it."""


def request_lines(headers: Headers, *, keep_authorization: bool) -> bytes:
    """A client's headers as lines for a node. Keys that open the router do not travel on."""
    kept: list[bytes] = []
    for name, value in headers:
        if name in _NOT_SENT_ON:
            if name == b"connection" and value.lower() not in _PLAIN_CONNECTION:
                return request_lines(_less_named(headers), keep_authorization=keep_authorization)
        elif name[:6] != b"x-ppd-" and (keep_authorization or name != b"authorization"):
            kept += (name, b": ", value, b"\r\n")
    return b"".join(kept)


def response_lines(head: Head) -> bytes:
    """A node's headers as lines for the client."""
    kept = b""
    for name, value in head.headers:
        lower = name.lower()
        if lower in _HOP_BY_HOP:
            if lower == b"connection" and value.lower() not in _PLAIN_CONNECTION:
                lowered = tuple((name.lower(), value) for name, value in head.headers)
                return response_lines(Head(head.status, head.reason, _less_named(lowered)))
        elif lower[:6] != b"x-ppd-":
            kept += b"%b: %b\r\n" % (lower, value)
    return kept


def _less_named(headers: Headers) -> Headers:
    """``headers`` without ``connection`` and without those that it makes hop-by-hop."""
    values = [value for name, value in headers if name == b"connection"]
    named = {part.strip().lower() for value in values for part in value.split(b",")}
    named.add(b"connection")
    return tuple(pair for pair in headers if pair[0] not in named)


def render(upstream: Upstream, method: str, target: str, headers: bytes, body: bytes) -> bytes:
    """A request on the wire."""
    first = f"{method} {upstream.origin.path}{target} HTTP/1.1\r\nhost: ".encode("latin-1")
    return b"%b%b\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
        first, upstream.authority, upstream.authorization, headers, len(body), body,
    )  # fmt: skip


def spliced(raw: bytes, body: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """``raw`` with ``extra`` in it; only written anew where a key of ``extra`` stands in ``body``.

    ``body`` is ``raw`` parsed.

    Raises:
        TooDeepError: a part that is written anew is nested too deeply.
    """
    if not extra:
        return raw
    if not body or any(key in body for key in extra):
        return written({**body, **extra})
    return raw[: raw.rindex(b"}")] + b"," + written(extra)[1:]


def receipt_lines(decision: Decision, node: str) -> bytes:
    """What the client may know about why its turn went where it went, as header lines."""
    lines = (
        f"x-ppd-route: {decision.route}\r\nx-ppd-node: {node}\r\n"
        f"x-ppd-reason: {decision.reason}\r\n"
    )
    if decision.cell is not None:
        lines += f"x-ppd-cell: {decision.cell}\r\n"
    if decision.score is not None:
        lines += f"x-ppd-score: {decision.score:.4f}\r\n"
    return lines.encode()


def error_body(message: str, kind: str, status: int) -> bytes:
    """An error as the OpenAI API writes it."""
    return orjson.dumps(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}
    )


def error_event(message: str, kind: str, status: int) -> bytes:
    """The same inside a stream that has begun."""
    return b"data: " + error_body(message, kind, status) + b"\n\n"
