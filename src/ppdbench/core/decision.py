"""What a policy may see, and what it answers."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Route(StrEnum):
    """Where a turn is computed.

    REMOTE: history to P, KV to D. LOCAL: append-prefill on the D that holds the KV.
    REPLICA: everything on one R. PULL: P first reads D's KV, then as REMOTE.
    """

    REMOTE = "remote"
    LOCAL = "local"
    REPLICA = "replica"
    PULL = "pull"


class Features(NamedTuple):
    """All a policy may look at.

    ``turn`` is 1-based. ``output_tokens`` is the expected reply length. ``rate_per_s`` is
    conversation arrivals per second. ``running`` is the number of requests now on the home
    node, ``None`` where nobody counts them. ``key`` names the (conversation, turn) for policies
    that draw lots; equal keys draw equal lots everywhere.
    """

    turn: int
    context_tokens: int
    new_tokens: int
    output_tokens: int
    rate_per_s: float
    running: int | None = None
    key: str = ""


class Decision(NamedTuple):
    """A route and why; the table cell's index and S where a table was asked."""

    route: Route
    reason: str
    cell: int | None = None
    score: float | None = None
