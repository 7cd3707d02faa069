"""Small tables with known figures."""

from __future__ import annotations

from ppdbench.table.schema import AXES, Cell, Table
from ppdbench.table.score import STATISTICS, Rule, Side


def side(ttft_s=0.1, tpot_s=0.01, success=1.0, n=50):
    """One route's figures; every statistic the same."""
    ttft, tpot = (dict.fromkeys(STATISTICS, value) for value in (ttft_s, tpot_s))
    return Side(n, success, ttft, tpot, tpot)


def cell(*, new=64, rate=2.0, gain=0.5, cost=0.0, context=1024, output=128, **parts):
    """A cell whose Δ_ttft is ``gain`` and whose Δ_tpot is ``cost``."""
    return Cell(
        **{
            "topology": "2P_2D",
            "workload": f"w{new}",
            "backend": "vllm",
            "centre": dict(zip(AXES, (context, new, output, rate), strict=True)),
            "remote": side(0.2, 0.01),
            "local": side(0.2 * (1 - gain), 0.01 * (1 + cost)),
            **parts,
        }
    )


def table_of(*cells, provenance=None, **rule):
    """A table of these cells under the default rule or another."""
    return Table(Rule(**rule), provenance or {"bases": ["2P_2D"], "backend": "vllm"}, cells)
