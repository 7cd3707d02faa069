"""The table behind ``ppd cluster status --watch``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from ppdbench.cluster.contract import ClusterSpec
    from ppdbench.cluster.counters import Reading

COLUMNS = ("node", "role", "running", "waiting", "KV use", "prefix hits", "read", "read rate")


def watch_cluster(spec: ClusterSpec, interval_s: float) -> None:
    """Redraw until interrupted; where stdout is no terminal, print a table per reading."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        for drawn in _tables(spec, interval_s):
            console.print(drawn)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for drawn in _tables(spec, interval_s):
            live.update(drawn, refresh=True)


def _tables(spec: ClusterSpec, interval_s: float) -> Iterator[Table]:
    before = _read(spec)
    while True:
        time.sleep(interval_s)
        now = _read(spec)
        yield table(spec, before, now, interval_s)
        before = now


def _read(spec: ClusterSpec) -> dict[str, Reading | None]:
    from ppdbench.cluster.counters import read_node
    from ppdbench.core.errors import EngineError

    readings: dict[str, Reading | None] = {}
    for node in spec.nodes:
        try:
            readings[node.name] = read_node(node)
        except EngineError:
            readings[node.name] = None
    return readings


def table(
    spec: ClusterSpec,
    before: dict[str, Reading | None],
    now: dict[str, Reading | None],
    interval_s: float,
) -> Table:
    """One row per node; what a node does not say is a dash."""
    from rich.table import Table

    shown = Table(*COLUMNS, title=f"{spec.topology}, over {interval_s:g} s")
    for node in spec.nodes:
        shown.add_row(node.name, node.role.value, *_cells(before[node.name], now[node.name],
                                                          interval_s))  # fmt: skip
    return shown


def _cells(before: Reading | None, now: Reading | None, interval_s: float) -> list[str]:
    if now is None:
        return ["down", *["–"] * (len(COLUMNS) - 3)]
    counted = now.counters.since(before.counters) if before is not None else now.counters
    moved = counted.received_bytes
    return [
        _count(now.gauges.running),
        _count(now.gauges.waiting),
        _share(now.gauges.kv_use, 1.0),
        _share(counted.cache_hit_tokens, _prompt_tokens(counted)),
        "–" if moved is None else f"{moved / 1e6:.1f} MB",
        "–" if moved is None else f"{moved / 1e6 / interval_s:.1f} MB/s",
    ]


def _prompt_tokens(counted: object) -> float:
    parts = ("computed_tokens", "cache_hit_tokens", "received_tokens")
    return sum(getattr(counted, part) or 0.0 for part in parts)


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _share(value: float | None, whole: float) -> str:
    return "–" if value is None or not whole else f"{value / whole:.0%}"
