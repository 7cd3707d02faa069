"""The table file: versioned, canonical, digested. ``docs/table-format.md`` is its manual.

A table is a rule plus evidence; every verdict in the file is derived from the two again at load,
so a file whose numbers contradict each other does not load even when its digest is right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ppdbench.core.errors import TableError, UsageError
from ppdbench.core.files import write_whole
from ppdbench.runs.manifest import SIMULATED
from ppdbench.table import kinds
from ppdbench.table.score import (
    STATISTICS,
    Choice,
    Guard,
    Rule,
    Side,
    Slo,
    Status,
    Verdict,
    judge,
)

FORMAT = "ppd-table"
SCHEMA_VERSION = 1
AXES = ("context_tokens", "new_tokens", "output_tokens", "rate_per_s")
"""The axes of version 1, in order; each cell has a place on all of them."""
UNITS = {axis: "1/s" if axis == "rate_per_s" else "tokens" for axis in AXES}
SIMULATED_NOTICE = "SIMULATED: figures come from the simulator, not from an engine"
"""Said wherever a table with a simulated cell is shown or obeyed."""
WEIGHTS = ("w_ttft", "w_tpot")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A point of the feature space, the figures of both routes there, and where they come from.

    ``spread`` holds the range per axis that the centre stands for, in cells from real
    conversations. ``replica`` are the figures of sticky replicas under the same load, when a run
    has them. ``filled`` is the decision that neighbours agree on, in a cell nobody measured.
    """

    topology: str
    workload: str
    backend: str
    centre: Mapping[str, float]
    repeats: int = 1
    remote: Side | None = None
    local: Side | None = None
    replica: Side | None = None
    replica_topology: str | None = None
    spread: Mapping[str, tuple[float, float]] | None = None
    replicates: Mapping[str, Sequence[int]] | None = None
    filled: Choice | None = None

    @property
    def key(self) -> tuple[str, tuple[tuple[str, float], ...]]:
        """Unique in a table: two cells may not share a topology and a centre."""
        return self.topology, tuple(sorted(self.centre.items()))

    @property
    def order(self) -> tuple[Any, ...]:
        return self.topology, *(self.centre[axis] for axis in AXES)

    def verdict(self, rule: Rule) -> Verdict:
        if self.filled is not None:
            return Verdict(self.filled, Status.INTERPOLATED)
        assert self.remote is not None
        assert self.local is not None
        return judge(self.remote, self.local, rule, self.replicates)


@dataclass(frozen=True)
class Table:
    """Rule, provenance and cells in canonical order; verdicts follow from them."""

    rule: Rule
    provenance: Mapping[str, Any]
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(sorted(self.cells, key=lambda cell: cell.order)))
        if not self.cells:
            raise TableError("a table needs at least one cell; build it from a run with both sides")
        keys = [cell.key for cell in self.cells]
        for before, after in pairwise(keys):
            if before == after:
                raise TableError(f"duplicate cell {_name(after)}: a centre may stand once")

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One per cell, in the order of ``cells``."""
        return tuple(cell.verdict(self.rule) for cell in self.cells)

    @property
    def topologies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.topology for cell in self.cells))

    @property
    def simulated(self) -> bool:
        """Whether any of its cells was not measured on an engine."""
        return any(cell.backend == SIMULATED for cell in self.cells)

    @cached_property
    def digest(self) -> str:
        return digest_of(_body(self))


def check_guard(cells: Iterable[Cell], rule: Rule) -> None:
    """A guard on a figure that nobody measured would pass every cell, as if it had looked.

    Raises:
        UsageError: naming the first such cell and the statistics that it has.
    """
    if rule.guard is None:
        return
    for cell in cells:
        sides = [side for side in (cell.remote, cell.local) if side and side.feasible(rule)]
        if len(sides) == 2 and not rule.guard.known(*sides):
            known = [s for s in STATISTICS if all(side.all_tpot_s.get(s) for side in sides)]
            raise UsageError(
                f"--guard tpot_{rule.guard.stat}: {describe(cell)} has no such figure over all "
                f"turns; known there: {', '.join(known) or 'none'}"
            )


def describe(cell: Cell) -> str:
    """A cell in a line: its workload and its place."""
    return f"{cell.workload} " + " ".join(f"{axis}={cell.centre[axis]:g}" for axis in AXES)


def _name(key: tuple[str, tuple[tuple[str, float], ...]]) -> str:
    return f"{key[0]} " + " ".join(f"{axis}={value:g}" for axis, value in key[1])


def counts(table: Table) -> dict[str, int]:
    """Cells by what they say; local and remote count only measured and one-sided cells."""
    counted = [v for v in table.verdicts if v.status in (Status.MEASURED, Status.ONE_SIDED)]
    statuses = [v.status for v in table.verdicts]
    return {
        "cells": len(statuses),
        **{choice.value: sum(v.choice is choice for v in counted) for choice in Choice},
        **{s.value: statuses.count(s) for s in Status if s is not Status.MEASURED},
    }


def plain(value: float) -> float:
    """Whole numbers as integers, so that 2048 tokens do not read 2048.0."""
    return int(value) if float(value).is_integer() else value


# --- to the file


def canonical(document: Document) -> bytes:
    """The only bytes a table may have: keys sorted, one top-level entry and one cell per line."""
    entries = []
    for key in sorted(document):
        value = document[key]
        if key == "cells" and isinstance(value, list):
            text = "[\n" + ",\n".join(_line(cell) for cell in value) + "\n]"
        else:
            text = _line(value)
        entries.append(f"{_line(key)}: {text}")
    return ("{\n" + ",\n".join(entries) + "\n}\n").encode()


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False)


def digest_of(body: Document) -> str:
    return "sha256:" + hashlib.sha256(canonical(body)).hexdigest()


def to_document(table: Table) -> Document:
    return {**_body(table), "digest": table.digest}


def _body(table: Table) -> Document:
    pairs = zip(table.cells, table.verdicts, strict=True)
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "provenance": dict(table.provenance),
        **_rule_document(table.rule),
        "axes": [_axis_document(table, axis) for axis in AXES],
        "cells": [_cell_document(cell, verdict, table.rule) for cell, verdict in pairs],
    }


def _rule_document(rule: Rule) -> Document:
    rest = asdict(rule) | {"undecided": rule.undecided.value}
    weights = {name: rest.pop(name) for name in WEIGHTS}
    return {"weights": weights, "statistic": rest.pop("stat"), "rule": rest}


def _axis_document(table: Table, axis: str) -> Document:
    values = [cell.centre[axis] for cell in table.cells]
    bounds = [min(values), max(values)]
    return {"name": axis, "unit": UNITS[axis], "scale": "log", "range": bounds}


def _cell_document(cell: Cell, verdict: Verdict, rule: Rule) -> Document:
    document: Document = {
        "topology": cell.topology,
        "workload": cell.workload,
        "backend": cell.backend,
        **cell.centre,
        "repeats": cell.repeats,
        **_flat(cell, rule.stat),
        "d_ttft": verdict.d_ttft,
        "d_tpot": verdict.d_tpot,
        "s": verdict.s,
        "s_ci": list(verdict.s_ci) if verdict.s_ci else None,
        "decision": verdict.choice.value,
        "status": verdict.status.value,
        "vetoed": verdict.vetoed,
    }
    for side in ("remote", "local", "replica"):
        document[side] = _side_document(getattr(cell, side))
    document["replica_topology"] = cell.replica_topology
    document["spread"] = cell.spread and {k: list(v) for k, v in cell.spread.items()}
    document["replicates"] = cell.replicates and {k: list(v) for k, v in cell.replicates.items()}
    return document


def _flat(cell: Cell, stat: str) -> Document:
    """The scored figures, beside the raw ones they are taken from."""
    flat: Document = {}
    for name, side in (("remote", cell.remote), ("local", cell.local)):
        flat[f"n_{name}"] = side.n if side else 0
        flat[f"ttft_{name}_s"] = side.ttft_s.get(stat) if side else None
        flat[f"tpot_{name}_s"] = side.tpot_s.get(stat) if side else None
    return flat


def _side_document(side: Side | None) -> Document | None:
    return None if side is None else asdict(side)


def save_table(table: Table, path: Path) -> None:
    """Write whole; a reader, the router's reload among them, sees the old table or the new one."""
    if not path.name or (path.exists() and not path.is_file()):
        raise UsageError(f"cannot write table {str(path)!r}: not a file's name; choose another -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, canonical(to_document(table)))
    except OSError as error:
        raise UsageError(
            f"cannot write table {path}: {error.strerror}; choose another -o"
        ) from error


# --- from the file


def load_table(path: Path) -> Table:
    """Read and verify a table.

    Raises:
        TableError: not a table, another schema version, not canonical, another digest, or figures
            that contradict each other.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TableError(
            f"cannot read table {path}: {error.strerror}; make one with ppd build-table"
        ) from error
    try:
        return parse_table(content)
    except UsageError as error:
        raise TableError(f"table {path}: {error}") from error


def parse_table(content: bytes) -> Table:
    document = _read_json(content)
    _check_version(document)
    _check_canonical(document, content)
    return _from_document(document, content)


def _read_json(content: bytes) -> Document:
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TableError(
            f"not readable as JSON ({error}): truncated or damaged; build or copy it again"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TableError(
            f'no decision table: "format": "{FORMAT}" was expected; make one with ppd build-table'
        )
    return document


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number a table may hold")


def _check_version(document: Document) -> None:
    version = document.get("schema_version")
    if version == SCHEMA_VERSION:
        return
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    advice = "upgrade ppdbench" if newer else "build it again with this ppd"
    raise TableError(
        f"schema version {version!r}; this ppd reads version {SCHEMA_VERSION}; {advice}"
    )


def _check_canonical(document: Document, content: bytes) -> None:
    stated = document.get("digest")
    try:
        actual = digest_of({key: value for key, value in document.items() if key != "digest"})
    except (TypeError, ValueError) as error:
        raise TableError(f"a value no table may hold ({error}); build it again") from error
    if stated != actual:
        raise TableError(
            f"its digest is {stated!r} but its content has {actual}: "
            "edited or damaged; build it again, or use ppd table reweight"
        )
    if canonical(document) != content:
        raise TableError("not in canonical form: edited or reformatted; build it again")


def _from_document(document: Document, content: bytes) -> Table:
    """Structure errors of any kind become one sentence; the digest was right, so it is rare."""
    try:
        kinds.check_provenance(document["provenance"])
        cells = tuple(_cell(cell) for cell in document["cells"])
        table = Table(_rule(document), document["provenance"], cells)
        _check_derived(table, document, content)
    except TableError:
        raise
    except UsageError as error:
        raise TableError(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TableError(
            f"a field is missing or of the wrong kind ({type(error).__name__}: {error}); "
            "build the table again"
        ) from error
    return table


def _check_derived(table: Table, document: Document, content: bytes) -> None:
    derived = to_document(table)
    if canonical(derived) != content:
        raise TableError(
            f"{_first_difference(derived, document)} does not follow from the raw "
            "figures and the rule in the file; build the table again"
        )


def _rule(document: Document) -> Rule:
    kinds.check(document["rule"], kinds.RULE, "the rule")
    kinds.check(document["weights"], kinds.WEIGHTS, "the weights")
    rest = dict(document["rule"])
    guard, slo = rest.pop("guard"), rest.pop("slo")
    return Rule(
        **document["weights"],
        stat=document["statistic"],
        undecided=Choice(rest.pop("undecided")),
        guard=Guard(**guard) if guard else None,
        slo=Slo(**slo) if slo else None,
        **rest,
    )


def _cell(document: Document) -> Cell:
    kinds.check(document, kinds.CELL, "a cell")
    centre = {axis: document[axis] for axis in AXES}
    filled = document["status"] == Status.INTERPOLATED
    sides = {name: _side(document[name]) for name in ("remote", "local", "replica")}
    if not filled and (sides["remote"] is None or sides["local"] is None):
        raise ValueError(f"cell {centre} lacks the figures of a side")
    spread = document["spread"]
    return Cell(
        topology=document["topology"],
        workload=document["workload"],
        backend=document["backend"],
        centre=centre,
        repeats=document["repeats"],
        **sides,
        replica_topology=document["replica_topology"],
        spread=spread and {k: (v[0], v[1]) for k, v in spread.items()},
        replicates=document["replicates"],
        filled=Choice(document["decision"]) if filled else None,
    )


def _side(document: Document | None) -> Side | None:
    if document is None:
        return None
    kinds.check(document, kinds.SIDE, "a side")
    return Side(**document)


def _first_difference(ours: Document, theirs: Document) -> str:
    if len(ours["cells"]) == len(theirs["cells"]):
        for index, (a, b) in enumerate(zip(ours["cells"], theirs["cells"], strict=True)):
            wrong = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
            if wrong:
                return f"cell {index}, field {wrong[0]!r},"
    return f"field {sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))}"
