"""A table file from disk decides each later turn of a simulated point."""

from __future__ import annotations

import os

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.topology import Topology
from ppdbench.load.simulated import run_simulated_point
from ppdbench.policy.table import load_table_policy
from ppdbench.sim.config import SimConfig
from ppdbench.table.schema import AXES, Cell, Table, save_table
from ppdbench.table.score import STATISTICS, Rule, Side


def side(ttft_s):
    ttft, tpot = dict.fromkeys(STATISTICS, ttft_s), dict.fromkeys(STATISTICS, 0.01)
    return Side(50, 1.0, ttft, tpot, tpot)


def cell(new_tokens, local_ttft_s):
    return Cell(
        topology="2P_2D",
        workload="w",
        backend="sim",
        centre=dict(zip(AXES, (512, new_tokens, 32, 2.0), strict=True)),
        remote=side(0.2),
        local=side(local_ttft_s),
    )


def write(path, short_is_local):
    """Cells for 32 and for 1,024 new tokens; one says local, the other remote."""
    fast, slow = (0.1, 0.3) if short_is_local else (0.3, 0.1)
    save_table(Table(Rule(), {}, (cell(32, fast), cell(1024, slow))), path)
    return str(path)


def routes(path):
    """Route and reason by new tokens of the later turns."""
    arrivals = [
        Arrival(0.5 * i, Conversation(f"c{i}", (Turn(480, 32), Turn(32, 32), Turn(1024, 32))))
        for i in range(6)
    ]
    outcome = run_simulated_point(
        Topology.parse("2P_2D"), load_table_policy(path), arrivals, 2.0, SimConfig(), seed=0
    )
    return {(r.new_tokens, r.route.value, r.reason) for r in outcome.records if r.turn > 1}


def test_the_simulator_obeys_the_table(tmp_path):
    """Turn 2 stands on a centre; Turn 3 has a longer context than was measured, and says so."""
    assert routes(write(tmp_path / "t.json", short_is_local=True)) == {
        (32, "local", "table"),
        (1024, "remote", "table,extrapolated"),
    }


def test_a_rewritten_table_is_read_again(tmp_path):
    """Policies are kept between points, but never past a change of the file."""
    path = tmp_path / "t.json"
    before = load_table_policy(write(path, short_is_local=True))
    same = load_table_policy(str(path))
    write(path, short_is_local=False)
    os.utime(path, ns=(1, 1))
    after = load_table_policy(str(path))

    assert before is same
    assert after is not before
    assert routes(str(path)) == {(32, "remote", "table"), (1024, "local", "table,extrapolated")}
