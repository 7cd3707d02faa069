"""What the nodes' own counters say about the path that a point's turns took."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.cluster.counters import Readings, read_nodes
from ppdbench.cluster.proof import Proof, prove
from ppdbench.core.errors import EngineError
from ppdbench.runs.records import TurnRecord

ATTEMPTS = 4
PAUSE_S = 0.25


async def read(cluster: ClusterSpec) -> Readings | None:
    """What the nodes have counted so far; ``None`` when one of them does not say."""
    try:
        return await asyncio.to_thread(read_nodes, cluster)
    except EngineError:  # no /metrics, or none that can be parsed
        return None


async def read_settled(cluster: ClusterSpec) -> Readings | None:
    """As :func:`read`, once what came before has been counted."""
    reading = await read(cluster)
    for _ in range(ATTEMPTS):
        await asyncio.sleep(PAUSE_S)
        earlier, reading = reading, await read(cluster)
        if reading == earlier:
            break
    return reading


async def path_facts(
    cluster: ClusterSpec, before: Readings | None, records: Sequence[TurnRecord]
) -> dict[str, Any]:
    """Facts of a point about its path, unknown where nobody counts.

    Engines count at their next step, so a no is asked again.
    """
    proof = None
    for _ in range(ATTEMPTS):
        after = await read(cluster)
        if before is None or after is None:
            return {"path_proven": None, "bytes_moved": None}
        proof = _proof(cluster, before, after, records)
        if not proof.problems:
            break
        await asyncio.sleep(PAUSE_S)
    assert proof is not None
    return {
        "path_proven": proof.proven,
        "path_problems": list(proof.problems),
        "bytes_moved": proof.bytes_moved,
    }


def _proof(
    cluster: ClusterSpec, before: Readings, after: Readings, records: Sequence[TurnRecord]
) -> Proof:
    """A failed turn may or may not have moved KV, so a proof without or with them will do."""
    measured = [record for record in records if not record.warm_up]
    good = Counter(record.route for record in measured if record.ok)
    proof = prove(cluster, before, after, good)
    if proof.problems and sum(good.values()) < len(measured):
        every = Counter(record.route for record in measured)
        with_failed = prove(cluster, before, after, every)
        return proof if with_failed.problems else with_failed
    return proof
