from __future__ import annotations

import io

from rich.console import Console

from ppdbench.cli.cluster_watch import table
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.counters import Counters, Gauges, Reading
from ppdbench.core.topology import Role

SPEC = ClusterSpec(
    (Node("p0", Role.P, "http://127.0.0.1:1"), Node("d0", Role.D, "http://127.0.0.1:2"))
)


def shown(before, now):
    console = Console(file=io.StringIO(), width=120)
    console.print(table(SPEC, before, now, 2.0))
    return console.file.getvalue()


def test_the_table_shows_load_kv_use_hits_and_the_transfer_rate():
    """Counters as differences over the interval, gauges as they are, a dead node as down."""
    before = Reading(Counters(0, 0, 0, received_bytes=0), Gauges())
    now = Reading(Counters(30, 60, 10, received_bytes=8e6), Gauges(3, 1, 0.25))

    text = shown({"p0": None, "d0": before}, {"p0": None, "d0": now})

    row = next(line for line in text.splitlines() if " d0 " in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "d0", "D", "3", "1", "25%", "60%", "8.0 MB", "4.0 MB/s",
    ]  # fmt: skip
    assert "down" in next(line for line in text.splitlines() if " p0 " in line)


def test_what_a_node_does_not_say_is_a_dash():
    """Never a 0 that nobody counted."""
    silent = Reading(Counters(), Gauges())

    text = shown({"p0": silent, "d0": silent}, {"p0": silent, "d0": silent})

    row = next(line for line in text.splitlines() if " d0 " in line)
    assert [cell.strip() for cell in row.split("│")[3:-1]] == ["–"] * 6
