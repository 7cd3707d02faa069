"""The policy that obeys a table."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ppdbench.core.decision import Decision, Features
from ppdbench.core.files import stamp_of
from ppdbench.core.topology import Role
from ppdbench.table.lookup import Lookup
from ppdbench.table.schema import Table, load_table


class TablePolicy:
    """A table's decision for its nearest cell; no state that a call changes."""

    __slots__ = ("_lookup", "name", "table")

    def __init__(self, table: Table, name: str, topology: str | None = None) -> None:
        self.table = table
        self.name = name
        self._lookup = Lookup(table, topology)

    def __repr__(self) -> str:
        return f"<TablePolicy {self.name} {self._lookup!r}>"

    def decide(self, features: Features, home: Role) -> Decision:  # noqa: ARG002
        return self._lookup.decide(features)


def load_table_policy(path: str, topology: str | None = None) -> TablePolicy:
    """Read FILE of ``table:FILE``; ``topology`` matters for a table that holds several.

    Raises:
        TableError: a file that is no good table.
        UsageError: a table of several topologies, none of them the cluster's.
    """
    return _kept_policy(path, topology, stamp_of(Path(path)))


@lru_cache(maxsize=8)
def _kept_policy(
    path: str,
    topology: str | None,
    stamp: tuple[int, ...] | None,  # noqa: ARG001 — a rewritten file is another key
) -> TablePolicy:
    """A sweep asks for the same table at every point, and making one costs more than a point."""
    return TablePolicy(load_table(Path(path)), f"table:{path}", topology)
