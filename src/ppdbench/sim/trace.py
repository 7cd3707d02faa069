"""A Chrome trace of one simulated point: open it in chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ppdbench.runs.records import TurnRecord
from ppdbench.sim.cluster import SimCluster, Transfer
from ppdbench.sim.step_log import Stretch

MICROSECOND = 1e-6
Event = dict[str, Any]


def write_trace(path: Path, cluster: SimCluster, records: Sequence[TurnRecord]) -> None:
    """Each node's steps, each transfer on its receiver, each request beside its home's steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(_events(cluster, records))}) + "\n")


def _events(cluster: SimCluster, records: Sequence[TurnRecord]) -> Iterator[Event]:
    for name, node in cluster.nodes.items():
        yield {"ph": "M", "name": "process_name", "pid": name, "args": {"name": name}}
        for stretch in node.log.stretches if node.log is not None else ():
            yield _step(name, stretch)
    for transfer in cluster.transfers:
        yield _transfer(transfer)
    for index, record in enumerate(records):
        yield from _request(index, record)


def _step(node: str, stretch: Stretch) -> Event:
    work = f"{stretch.prompt_tokens} prompt tokens" if stretch.prompt_tokens else "decode"
    times = f" ×{stretch.steps}" if stretch.steps > 1 else ""
    shape = {"batch": stretch.batch, "prompt_tokens": stretch.prompt_tokens}
    return _span(node, "steps", work + times, stretch.from_s, stretch.seconds, shape)


def _transfer(transfer: Transfer) -> Event:
    seconds = transfer.to_s - transfer.from_s
    name = f"KV from {transfer.source}"
    return _span(
        transfer.target, "transfers", name, transfer.from_s, seconds, {"tokens": transfer.tokens}
    )


def _request(index: int, record: TurnRecord) -> Iterator[Event]:
    """Asynchronous events, because requests overlap."""
    if record.finished_at_s is None:
        return
    name = f"{record.conversation}/{record.turn} {record.route}"
    common = {"cat": "request", "id": index, "pid": record.node, "tid": "requests", "name": name}
    yield {**common, "ph": "b", "ts": record.scheduled_at_s / MICROSECOND}
    if record.first_token_at_s is not None:
        first = {"ph": "n", "ts": record.first_token_at_s / MICROSECOND}
        yield {**common, **first, "args": {"event": "first token"}}
    yield {**common, "ph": "e", "ts": record.finished_at_s / MICROSECOND}


def _span(  # noqa: PLR0913, PLR0917 - the fields of an event
    node: str, row: str, name: str, from_s: float, seconds: float, arguments: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "pid": node,
        "tid": row,
        "name": name,
        "ts": from_s / MICROSECOND,
        "dur": seconds / MICROSECOND,
        "args": arguments,
    }
