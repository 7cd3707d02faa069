"""The policy of a point."""

from __future__ import annotations

from collections.abc import Iterable

from ppdbench.policy.base import Policy
from ppdbench.policy.parse import parse_policy
from ppdbench.policy.table import load_table_policy
from ppdbench.runs.points import PointKey


def policy_of(key: PointKey) -> Policy:
    """By its name; a table is read here, for the point's topology."""
    return parse_policy(key.policy, lambda path: load_table_policy(path, key.topology))


def check_policies(keys: Iterable[PointKey]) -> None:
    """Read every policy once, before anything is launched or measured.

    Raises:
        UsageError: no such policy, or a table that cannot be read.
    """
    for key in {(key.topology, key.policy): key for key in keys}.values():
        policy_of(key)
