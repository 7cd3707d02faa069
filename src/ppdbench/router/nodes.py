"""The nodes behind the router, as this worker sees them."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import NodeSpec, Role
from ppdbench.http.client import Pool
from ppdbench.http.messages import Headers, Origin
from ppdbench.router.board import Board, Common, Tally

PER_NODE = (
    "running", "prefill_tokens", "requests", "failures", "epoch", "lost_s", "gone_s", "kv_next",
    "kv_connected", "kv_readable", "progress_s",
)  # fmt: skip
"""Board values of each node; from ``epoch`` on all workers share one.

``failures`` are broken connections. Turns that ended by ``lost_s`` have left no KV, as an answer's
cached tokens showed. What KV events told: turns that ended by ``gone_s`` have left none either;
``kv_next`` is the next batch's number, 0 before the first; ``kv_connected`` is 0 or 1, and so is
``kv_readable``: whether the last message was a batch, 0 before the first of this listener.
``progress_s`` is when the node last sent bytes to any worker, by the machine's monotonic clock.
"""

GAUGES = ("running", "prefill_tokens")

HEARING = ("kv_connected", "kv_readable")
"""True only as long as a worker listens to the node's KV events."""


@dataclass(slots=True)
class Upstream:
    """A node and what is known of it; ``index`` is its place in the cluster file.

    ``pool`` has the connections to it, by its own certificate authority where it names one.
    ``authorization`` is the node's own key as a header line, or nothing. ``alive`` is this worker's
    own judgement (:mod:`ppdbench.router.health`); ``strikes`` counts
    failures, or successes of a dead node, in a row.
    """

    index: int
    name: str
    role: Role
    node: Node
    spec: NodeSpec
    origin: Origin
    pool: Pool
    authority: bytes
    authorization: bytes = field(repr=False)
    running: Tally
    prefill_tokens: Tally
    requests: Tally
    failures: Tally
    epoch_cell: Common
    lost_s: Common
    gone_s: Common
    kv_next: Common
    kv_connected: Common
    kv_readable: Common
    progress_cell: Common
    alive: bool = True
    strikes: int = 0
    progress_at_s: float = 0.0

    @property
    def authorization_pair(self) -> Headers:
        """The node's own key as a header, or nothing."""
        name, _, value = self.authorization.strip().partition(b": ")
        return ((name, value),) if name else ()

    @property
    def epoch(self) -> int:
        """The node's incarnation; KV of an earlier one is gone."""
        return int(self.epoch_cell.get())

    @property
    def is_heard(self) -> bool:
        """Whether its KV events are read: a publisher may be there and say nothing, or nonsense."""
        return bool(self.kv_connected.get() and self.kv_readable.get())


class Upstreams:
    """All nodes of the cluster in file order."""

    def __init__(self, spec: ClusterSpec, board: Board) -> None:
        authorities = {node.ca_file for node in spec.nodes}
        self.pools = {ca_file: Pool(tls=_tls(ca_file)) for ca_file in authorities}
        self.all = tuple(
            _upstream(at, node, board, self.pools[node.ca_file])
            for at, node in enumerate(spec.nodes)
        )
        self.homes = tuple(node for node in self.all if node.role.decodes)
        self.prefills = tuple(node for node in self.all if node.role is Role.P)
        self._by_name = {node.name: node for node in self.all}

    def __repr__(self) -> str:
        states = (f"{node.name}{'' if node.alive else ' dead'}" for node in self.all)
        return f"<Upstreams {', '.join(states)}>"

    def __getitem__(self, name: str) -> Upstream:
        return self._by_name[name]

    def home_at(self, index: int) -> Upstream | None:
        """The node a note names, if it still is one that decodes."""
        node = self.all[index] if index < len(self.all) else None
        return node if node is not None and node.role.decodes else None


def _tls(ca_file: str | None) -> ssl.SSLContext | None:
    """For ``https`` nodes signed by an authority of their own; ``None`` means the system's.

    Raises:
        UsageError: the file is no certificate.
    """
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise UsageError(f"ca_file {ca_file!r} cannot be used: {error}") from error


def _upstream(at: int, node: Node, board: Board, pool: Pool) -> Upstream:
    origin = Origin.parse(node.url)
    lines = (f"{name.lower()}: {value}\r\n" for name, value in node.headers().items())
    return Upstream(
        index=at,
        name=node.name,
        role=node.role,
        node=node,
        spec=NodeSpec(node.name, node.role),
        origin=origin,
        pool=pool,
        authority=origin.authority.encode(),
        authorization="".join(lines).encode(),
        running=board.tally(f"running:{node.name}"),
        prefill_tokens=board.tally(f"prefill_tokens:{node.name}"),
        requests=board.tally(f"requests:{node.name}"),
        failures=board.tally(f"failures:{node.name}"),
        epoch_cell=board.common(f"epoch:{node.name}"),
        lost_s=board.common(f"lost_s:{node.name}"),
        gone_s=board.common(f"gone_s:{node.name}"),
        kv_next=board.common(f"kv_next:{node.name}"),
        kv_connected=board.common(f"kv_connected:{node.name}"),
        kv_readable=board.common(f"kv_readable:{node.name}"),
        progress_cell=board.common(f"progress_s:{node.name}"),
    )


def board_names(spec: ClusterSpec) -> Iterable[str]:
    """Names of the per-node values on the board."""
    return (f"{what}:{node.name}" for node in spec.nodes for what in PER_NODE)
