"""Table files for routers under test."""

from __future__ import annotations

from itertools import product

from ppdbench.table.schema import AXES, Cell, Table, save_table
from ppdbench.table.score import STATISTICS, Rule, Side


def a_table(path, *, local: bool, **provenance):
    """A table whose cells all say the same."""
    fast, slow = (dict.fromkeys(STATISTICS, seconds) for seconds in (0.05, 0.2))
    tpot_s = dict.fromkeys(STATISTICS, 0.01)
    sides = [Side(50, 1.0, ttft_s, tpot_s, tpot_s) for ttft_s in (slow, fast)]
    remote, near = sides if local else sides[::-1]
    cells = tuple(
        Cell(
            topology="1P_1D",
            workload=f"w{at}",
            backend="sim",
            centre=dict(zip(AXES, place, strict=True)),
            remote=remote,
            local=near,
        )
        for at, place in enumerate(product((64, 4096), (16, 512), (16, 256), (1.0, 32.0)))
    )
    table = Table(Rule(), provenance, cells)
    save_table(table, path)
    return table
