"""What a cluster is to everybody else: named nodes with roles and addresses, kept in TOML."""

from __future__ import annotations

import json
import os
import ssl
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Role, Topology

NOT_AN_ENGINE = "+ppdbench"
"""Ends the version that our own nodes give: they only speak the API, so it tells of no engine."""

_FIELDS = {"name", "role", "url", "metrics_url", "kv_events", "api_key_env", "ca_file"}


@dataclass(frozen=True, slots=True)
class Node:
    """A reachable node. ``url`` has no path and no trailing slash.

    ``api_key_env`` names the environment variable with the bearer token, so no file ever holds a
    key. ``ca_file`` is the authority that signed an ``https`` node's certificate. ``kv_events``
    is the ZMQ endpoint at which it publishes KV events, for the router.
    """

    name: str
    role: Role
    url: str
    metrics_url: str = ""
    kv_events: str | None = None
    api_key_env: str | None = None
    ca_file: str | None = None

    def __post_init__(self) -> None:
        if not _is_address(self.url, path=False):
            raise UsageError(
                f"url {self.url!r} of node {self.name!r} is not http(s)://host:port "
                "without a path or credentials (a key comes by api_key_env)"
            )
        if not self.name.isprintable():
            raise UsageError(
                f"node {self.name!r}: a name goes into headers; give one that can be printed"
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))
        object.__setattr__(self, "metrics_url", self.metrics_url or f"{self.url}/metrics")
        if not _is_address(self.metrics_url, path=True):
            raise UsageError(
                f"metrics_url {self.metrics_url!r} of node {self.name!r} is not "
                "http(s)://host:port/path"
            )
        if self.kv_events is not None and not _is_zmq_endpoint(self.kv_events):
            raise UsageError(
                f"kv_events {self.kv_events!r} of node {self.name!r} is neither tcp://host:port, "
                "with the host that others reach it at, nor ipc://path"
            )

    def headers(self) -> dict[str, str]:
        """Authorization for this node, or nothing.

        Raises:
            UsageError: ``api_key_env`` names a variable that is not set, or holds no key.
        """
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UsageError(
                f"node {self.name!r} takes its API key from ${self.api_key_env}, which is not set; "
                f"export {self.api_key_env}=…"
            )
        if not (key.isascii() and key.isprintable()):
            raise UsageError(
                f"node {self.name!r}: ${self.api_key_env} holds a line break or another character "
                "that no HTTP header can carry; export the key alone"
            )
        return {"Authorization": f"Bearer {key}"}

    def tls(self) -> ssl.SSLContext:
        """Whom to trust when this node speaks ``https``: its ``ca_file``, else the system.

        Raises:
            UsageError: ``ca_file`` cannot be read or holds no certificate.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise UsageError(
                f"node {self.name!r}: ca_file {self.ca_file!r} cannot be used ({error}); "
                "give a PEM file with the authority's certificate"
            ) from error


def _is_address(text: str, *, path: bool) -> bool:
    """Whether ``text`` is an ``http(s)`` address with a port that exists; ``path`` allows one.

    Credentials in it would be shown wherever the address is; ``api_key_env`` is for keys.
    """
    try:
        url = urlsplit(text)
        port = url.port
        (url.hostname or "").encode("idna")
    except ValueError:
        return False
    if url.username is not None:
        return False
    bare = url.path in ("", "/") and not url.query and not url.fragment
    return url.scheme in ("http", "https") and bool(url.hostname) and port != 0 and (path or bare)


def _is_zmq_endpoint(text: str) -> bool:
    """Whether one can connect to ``text``; ``tcp://*:5557`` is how a publisher binds."""
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        return False
    if url.scheme == "ipc":
        return len(text) > len("ipc://")
    return url.scheme == "tcp" and bool(host) and host != "*" and bool(port) and not url.path


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The nodes of one cluster, in topology order. Names are unique; P stands with D or pD."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        twice = {name for name in names if names.count(name) > 1}
        if not names or twice:
            raise UsageError(f"a cluster needs nodes with unique names; got {names or 'none'}")
        urls = [node.url for node in self.nodes]
        for url in urls:
            if urls.count(url) > 1:
                raise UsageError(f"{url} stands for two nodes; each node has a URL of its own")
        self.topology  # noqa: B018  (raises when the roles do not make a cluster)

    @property
    def topology(self) -> Topology:
        """Roles counted, in the order of their first node."""
        roles = [node.role for node in self.nodes]
        return Topology(tuple((roles.count(role), role) for role in dict.fromkeys(roles)))

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


def read_cluster(path: Path) -> ClusterSpec:
    """Read a ``cluster.toml``.

    Raises:
        UsageError: the file is missing, is no TOML, or does not describe a cluster.
    """
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        raise UsageError(
            f"cluster file {path} does not exist; `ppd cluster up TOPOLOGY` writes one"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cluster file {path} cannot be read: {error}") from error
    return parse_cluster(document, str(path))


def parse_cluster(document: Mapping[str, Any], source: str) -> ClusterSpec:
    """A parsed TOML document as a cluster; ``source`` names it in errors."""
    entries = document.get("node")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, Mapping) for entry in entries)
    ):
        raise UsageError(
            f"{source}: no [[node]] in it; each node is [[node]] with name, role and url"
        )
    return ClusterSpec(tuple(_node(entry, source) for entry in entries))


def _node(entry: Mapping[str, Any], source: str) -> Node:
    missing = {"name", "role", "url"} - entry.keys()
    unknown = entry.keys() - _FIELDS
    wrong = sorted(key for key, value in entry.items() if not isinstance(value, str))
    if missing or unknown or wrong:
        raise UsageError(
            f"{source}: node {entry.get('name', '?')!r}: "
            f"missing {sorted(missing)}, unknown {sorted(unknown)}, not a text {wrong}; "
            f"fields are {sorted(_FIELDS)}"
        )
    fields = {key: value for key, value in entry.items() if key != "role"}
    try:
        return Node(role=read_role(entry["role"]), **fields)
    except UsageError as error:
        raise UsageError(f"{source}, node {entry['name']!r}: {error}") from None


def read_role(text: str) -> Role:
    """A role as written in files and options."""
    try:
        return Role(text)
    except ValueError:
        raise UsageError(f"role {text!r} is unknown; roles are P, D, pD and R") from None


def write_cluster(spec: ClusterSpec, path: Path) -> None:
    """Write ``spec`` so that :func:`read_cluster` gives it back."""
    path.write_text("\n".join(_lines(spec)), encoding="utf-8")


def _lines(spec: ClusterSpec) -> Iterable[str]:
    for node in spec.nodes:
        yield "[[node]]"
        yield f"name = {_quoted(node.name)}"
        yield f"role = {_quoted(node.role)}"
        yield f"url = {_quoted(node.url)}"
        for key in ("metrics_url", "kv_events", "api_key_env", "ca_file"):
            value = getattr(node, key)
            if value is not None:
                yield f"{key} = {_quoted(value)}"
        yield ""


def _quoted(text: str) -> str:
    """JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def named_cluster(path: Path | None, nodes: Sequence[str]) -> ClusterSpec:
    """The cluster of ``--cluster FILE`` or of ``--node ROLE=URL …``.

    Raises:
        UsageError: both or neither is given, or what is given describes no cluster.
    """
    if (path is None) == (not nodes):
        raise UsageError("name the nodes: either --cluster cluster.toml or --node ROLE=URL …")
    return cluster_from_options(nodes) if path is None else read_cluster(path)


def cluster_from_options(options: Iterable[str]) -> ClusterSpec:
    """Nodes as ``--node ROLE=URL`` gives them; names are ``p0``, ``d0``, ``d1`` in order."""
    counts: dict[Role, int] = {}
    nodes = []
    for option in options:
        text, separator, url = option.partition("=")
        if not separator:
            raise UsageError(f"--node {option!r} is not ROLE=URL, as in P=http://127.0.0.1:8101")
        role = read_role(text)
        nodes.append(Node(f"{role.lower()}{counts.get(role, 0)}", role, url))
        counts[role] = counts.get(role, 0) + 1
    return ClusterSpec(tuple(nodes))
