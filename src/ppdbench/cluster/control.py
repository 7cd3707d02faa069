"""Plain, blocking requests to a node for everything that is not load: health, metrics, canaries."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from ppdbench.cluster.contract import Node
from ppdbench.core.errors import EngineError


class NodeError(EngineError):
    """A node refused, did not answer, or answered with an error status (``status``, if any)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def get(node: Node, url: str, timeout_s: float) -> str:
    """The text at ``url`` with this node's key and certificate authority."""
    return _call(node, "GET", url, None, timeout_s).decode(errors="replace")


def get_json(node: Node, path: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object at ``path``."""
    url = node.url + path
    return _document(node, url, _call(node, "GET", url, None, timeout_s))


def post(node: Node, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The JSON answer to a JSON request."""
    url = node.url + path
    return _document(node, url, _call(node, "POST", url, json.dumps(body).encode(), timeout_s))


def _document(node: Node, url: str, answer: bytes) -> dict[str, Any]:
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        text = answer[:100].decode(errors="replace")
        raise NodeError(
            f"node {node.name} at {url} answered {text!r}, which is no JSON object; "
            "check that this is the address of a vLLM server"
        )
    return document


def _call(node: Node, method: str, url: str, body: bytes | None, timeout_s: float) -> bytes:
    connection = _connect(node, url, timeout_s)
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {**node.headers(), "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise NodeError(f"node {node.name} at {url} did not answer: {reason}") from error
    finally:
        connection.close()
    if response.status >= 400:
        text = content[:300].decode(errors="replace")
        raise NodeError(f"node {node.name} answered {response.status} to {method} {path}: {text}",
                        response.status)  # fmt: skip
    return content


def _connect(node: Node, url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=node.tls()
        )
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
