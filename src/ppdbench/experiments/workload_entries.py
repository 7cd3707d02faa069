"""The entries of a grid that make conversations: ``[[workload]]`` and ``[think]``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from ppdbench.experiments.toml_table import Table
from ppdbench.workload.dataset import RecordedTurns
from ppdbench.workload.lengths import Lengths
from ppdbench.workload.select import Selection
from ppdbench.workload.synthetic import DrawnTurns, FixedTurns
from ppdbench.workload.think import KINDS as THINK_KINDS
from ppdbench.workload.think import ThinkTime
from ppdbench.workload.tokens import DEFAULT

Workload = FixedTurns | DrawnTurns | RecordedTurns


def read_workloads(top: Table, think: ThinkTime) -> tuple[Workload, ...]:
    """Every ``[[workload]]``; one without its own ``think`` takes the grid's."""
    entries = top.take("workload", list)
    workloads = [
        _workload(Table(top.path, f"[[workload]] {i}", entry), think)
        for i, entry in enumerate(entries, 1)
    ]
    names = [workload.name for workload in workloads]
    if not names or len(set(names)) != len(names):
        raise top.error("workload", "must have different names, and at least one entry")
    return tuple(workloads)


def _workload(table: Table, think: ThinkTime) -> Workload:
    name = table.take("name", str)
    if not name or set(name) & set("/@ "):
        raise table.error("name", f"is {name!r}; expected letters without /, @ or spaces")
    think = read_think(table.table("think"), think)
    workload = _READERS[table.one_of(*_READERS)](table, name, think)
    table.close()
    return workload


def _fixed(table: Table, name: str, think: ThinkTime) -> Workload:
    turns = table.take("turns", list)
    if not turns or not all(map(_is_pair_of_counts, turns)):
        raise table.error("turns", f"is {turns!r}; expected [[new, output], …] in tokens")
    _refuse_recorded(table, think)
    return FixedTurns(name, tuple((new, out) for new, out in turns), think, *_system(table))


def _is_pair_of_counts(turn: object) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(map(_is_count, turn))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _drawn(table: Table, name: str, think: ThinkTime) -> Workload:
    draw = table.table("draw")
    first = _lengths(draw, "first_tokens") if draw.has("first_tokens") else None
    system_tokens, shared = _system(table)
    workload = DrawnTurns(
        name,
        turns=_lengths(draw, "turns"),
        new_tokens=_lengths(draw, "new_tokens"),
        output_tokens=_lengths(draw, "output_tokens"),
        first_tokens=first,
        think=think,
        system_tokens=system_tokens,
        shared=shared,
    )
    draw.close()
    _refuse_recorded(table, think)
    return workload


def _recorded(table: Table, name: str, think: ThinkTime) -> Workload:
    source, tokenizer = table.take("source", str), table.take("tokenizer", str, DEFAULT)
    limits = ("max_turns", "max_input_tokens", "max_output_tokens", "max_context_tokens", "sample")
    selection = Selection(
        min_turns=table.take_count("min_turns", 1),
        languages=table.take_names("languages", []),
        models=table.take_names("models", []),
        drop_toxic=table.take("drop_toxic", bool, default=False),
        drop_redacted=table.take("drop_redacted", bool, default=False),
        seed=table.take_count("sample_seed", 0, least=0),
        **{key: table.take_count(key, None) for key in limits},
    )
    return RecordedTurns(name, _beside(table.path, source), selection, tokenizer, think)


_READERS = {"turns": _fixed, "draw": _drawn, "source": _recorded}


def _beside(grid: Path, source: str) -> str:
    """A relative path in a grid file is relative to that file."""
    beside = grid.parent / source
    return str(beside) if beside.exists() else source


def _system(table: Table) -> tuple[int, bool]:
    tokens: int = table.take_count("system_tokens", 0, least=0)
    shared: bool = table.take("shared_system", bool, default=True)
    return tokens, shared


def _refuse_recorded(table: Table, think: ThinkTime) -> None:
    if think.kind == "recorded":
        raise table.error("think", "`recorded` needs recorded conversations; this one is synthetic")


_PARAMETERS = {
    "fixed": "a number",
    "uniform": "[low, high]",
    "lognormal": "[median, sigma]",
    "gamma": "[mean, cv]",
}


def _lengths(table: Table, key: str) -> Lengths:
    value = table.take(key, (int, dict))
    inner = Table(
        table.path, f"{table.where} {key}", value if isinstance(value, dict) else {"fixed": value}
    )
    low, high = inner.take_count("min", 1), inner.take_count("max", 2**31 - 1)
    if low > high:
        raise inner.error("min", f"is {low}, above `max` {high}")
    kind = inner.one_of(*_PARAMETERS, "file")
    if kind == "file":
        lengths = Lengths("observed", values=_observed(inner), low=low, high=high)
    else:
        first, second = _parameters(inner, kind)
        lengths = Lengths(kind, first, second, low=low, high=high)
    inner.close()
    return lengths


def _parameters(table: Table, kind: str) -> tuple[float, float]:
    value = table.take(kind, (float, list))
    numbers = value if isinstance(value, list) else [value]
    good = len(numbers) == (1 if kind == "fixed" else 2) and all(
        isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < math.inf for n in numbers
    )
    if not good or (kind == "uniform" and numbers[0] > numbers[1]):
        raise table.error(kind, f"is {value!r}; expected {_PARAMETERS[kind]}, above 0")
    return float(numbers[0]), float(numbers[-1])


def _observed(table: Table) -> tuple[int, ...]:
    path = table.path.parent / table.take("file", str)
    try:
        values = tuple(int(word) for word in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise table.error("file", f"{str(path)!r} is no list of whole numbers ({error})") from error
    if not values or min(values) < 1:
        raise table.error("file", f"{str(path)!r} must hold whole numbers from 1 on")
    return values


def read_think(table: Table, default: ThinkTime) -> ThinkTime:
    """The table's pauses; ``default`` where it is empty."""
    kind = table.take("kind", str, None)
    if kind is None:
        table.close()
        return default
    if kind not in THINK_KINDS:
        raise table.error("kind", f"is {kind!r}; expected one of {', '.join(THINK_KINDS)}")
    think = ThinkTime(kind)
    if kind in ("fixed", "exponential", "lognormal"):
        think = replace(think, seconds=table.take_positive("seconds"))
    if kind == "lognormal":
        think = replace(think, sigma=table.take_positive("sigma"))
    if kind in ("exponential", "lognormal", "recorded") and table.has("max_s"):
        think = replace(think, max_s=table.take_positive("max_s"))
    table.close()
    return think
