"""The policy contract and the names that stand for policies on the command line and in grids."""

from __future__ import annotations

from typing import Protocol

from ppdbench.core.decision import Decision, Features
from ppdbench.core.topology import Role


class Policy(Protocol):
    """Chooses a route for one turn. Pure: no clock, no I/O, no state that a call changes."""

    @property
    def name(self) -> str:
        """The text that :func:`ppdbench.policy.parse.parse_policy` turns back into this policy."""
        ...

    def decide(self, features: Features, home: Role) -> Decision:
        """Route of a turn whose conversation lives on a ``home`` node (R, D or pD).

        Callers ask :func:`ppdbench.policy.rules.decide`, which first applies what no policy may
        change (Turn 1 goes remote, an R serves every turn).
        """
        ...
