"""Which path the turns of a point took, by the nodes' own counters. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.counters import Counters, Readings
from ppdbench.core.decision import Route
from ppdbench.core.topology import Role


@dataclass(frozen=True, slots=True)
class Proof:
    """``proven`` is ``None`` where the nodes count too little to tell.

    ``problems`` are sentences; any makes ``proven`` false. ``bytes_moved`` is the KV that nodes
    read from each other; ``computed_on_prefill_tokens`` and ``computed_on_home_tokens`` are the
    prompt tokens computed by P nodes and by the others. ``transfer_s`` is the time of all reads.
    """

    proven: bool | None
    problems: tuple[str, ...]
    bytes_moved: float | None
    transfers: float | None
    transfer_s: float | None
    computed_on_prefill_tokens: float | None
    computed_on_home_tokens: float | None


def prove(
    cluster: ClusterSpec, before: Readings, after: Readings, turns: Mapping[Route, int]
) -> Proof:
    """Hold what the nodes counted against the turns that were sent by each route.

    ``turns`` counts finished good turns, Turn 1 included; nothing else may have used the cluster
    between the readings.
    """
    deltas = {n.name: after[n.name].counters.since(before[n.name].counters) for n in cluster.nodes}
    prefill = [deltas[n.name] for n in cluster.nodes if n.role is Role.P]
    homes = [deltas[n.name] for n in cluster.nodes if n.role is not Role.P]
    problems = tuple(_problems(cluster, deltas, turns))
    known = all(c.computed_tokens is not None for c in deltas.values())
    if _handed_over(turns) and _reads(homes) is None:
        known = False
    return Proof(
        False if problems else (True if known else None),
        problems,
        _sum(deltas.values(), "received_bytes"),
        _sum(deltas.values(), "transfers"),
        _sum(deltas.values(), "transfer_s"),
        _sum(prefill, "computed_tokens"),
        _sum(homes, "computed_tokens"),
    )


def _sum(counters: object, field: str) -> float | None:
    """The sum of what is known; ``None`` when no node says it (a replica has no transfers)."""
    values = [getattr(each, field) for each in counters]  # type: ignore[attr-defined]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _handed_over(turns: Mapping[Route, int]) -> int:
    return turns.get(Route.REMOTE, 0) + turns.get(Route.PULL, 0)


def _reads(homes: list[Counters]) -> float | None:
    """Evidence that KV came: transfers; tokens where a connector does not count transfers."""
    transfers = _sum(homes, "transfers")
    return _sum(homes, "received_tokens") if transfers is None else transfers


def _problems(
    cluster: ClusterSpec, deltas: Mapping[str, Counters], turns: Mapping[Route, int]
) -> Iterator[str]:
    handed_over = _handed_over(turns)
    by_role = [(node, deltas[node.name]) for node in cluster.nodes]
    for node, counted in by_role:
        yield from _node_problems(node, counted)
    homes = [c for n, c in by_role if n.role.needs_prefill_node]
    yield from _hand_off_problems(homes, handed_over)
    yield from _prefill_problems([c for n, c in by_role if n.role is Role.P], handed_over, turns)


def _node_problems(node: Node, counted: Counters) -> Iterator[str]:
    if (counted.computed_tokens or 0) < 0 or (counted.finished_requests or 0) < 0:
        yield f"{node.name} counts less than before: it was started anew in the meantime"
    if counted.failed_transfers:
        yield f"{node.name} failed {counted.failed_transfers:g} KV transfers"
    if node.role is Role.P and counted.expired_hand_offs:  # a D's are offers that no pull took
        yield f"{node.name} freed {counted.expired_hand_offs:g} hand-offs that nobody read in time"
    if node.role is Role.R and counted.received_tokens:
        yield f"replica {node.name} received {counted.received_tokens:g} tokens of KV"


def _hand_off_problems(homes: list[Counters], handed_over: int) -> Iterator[str]:
    transfers, received = _sum(homes, "transfers"), _sum(homes, "received_tokens")
    if handed_over and _reads(homes) == 0:
        yield f"{handed_over} turns went through P and no D read any KV: they were local in secret"
    if transfers is not None and transfers > handed_over:
        yield f"D nodes read KV {transfers:g} times for {handed_over} turns that went through P"
    if not handed_over and received:
        yield f"no turn went through P and D nodes received {received:g} tokens of KV"


def _prefill_problems(
    prefill: list[Counters], handed_over: int, turns: Mapping[Route, int]
) -> Iterator[str]:
    served, pulls = _sum(prefill, "finished_requests"), _sum(prefill, "transfers")
    if served is not None and served < handed_over:
        yield f"P nodes finished {served:g} requests for {handed_over} turns that went through P"
    wanted = turns.get(Route.PULL, 0)
    if pulls is not None and pulls > wanted:
        yield f"P nodes read KV {pulls:g} times for {wanted} pulls"
    if wanted and not pulls:
        yield f"{wanted} turns were sent as pulls and no P read any KV"
