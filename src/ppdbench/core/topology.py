"""Cluster shapes: ``4R``, ``1P_3D``, ``2P_1D_1pD``, ``1R_1P_2D``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from ppdbench.core.errors import UsageError


class Role(StrEnum):
    """What a node does. ``PD`` is a D on which local append-prefill is always allowed."""

    R = "R"
    P = "P"
    D = "D"
    PD = "pD"

    @property
    def decodes(self) -> bool:
        return self is not Role.P

    @property
    def needs_prefill_node(self) -> bool:
        return self in (Role.D, Role.PD)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of a topology; ``name`` is unique in it (``p0``, ``d0``, ``pd0``, ``r0``)."""

    name: str
    role: Role


_PART = re.compile(r"([1-9][0-9]*)(pD|P|D|R)")

NAMED_TOPOLOGIES = (
    "4R",
    "1P_3D", "2P_2D", "3P_1D",
    "1P_3pD", "2P_2pD", "3P_1pD",
    "1P_2D_1pD", "1P_1D_2pD", "2P_1D_1pD",
    "1R_1P_2D", "1R_1P_1D_1pD", "1R_1P_2pD", "1R_2P_1D", "1R_2P_1pD", "2R_1P_1D", "2R_1P_1pD",
)  # fmt: skip
"""The seventeen four-node shapes of the paper, in its order."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Counts per role, in the order written. ``Topology.parse(str(t)) == t``.

    Raises:
        UsageError: a part that is not ``<n><role>``, a role named twice, or P without D (or D
            without P).
    """

    parts: tuple[tuple[int, Role], ...]

    def __post_init__(self) -> None:
        roles = [role for _, role in self.parts]
        if len(set(roles)) != len(roles):
            raise UsageError(f"topology {self}: a role stands in it twice; write each role once")
        needs_p = any(role.needs_prefill_node for role in roles)
        if needs_p != (Role.P in roles):
            raise UsageError(
                f"topology {self}: P is present exactly when D or pD is; "
                "add the missing part, as in 1P_3D, or use replicas, as in 4R"
            )

    @classmethod
    def parse(cls, name: str) -> Topology:
        """Read a name such as ``2P_1D_1pD``."""
        parts = []
        for part in name.split("_"):
            match = _PART.fullmatch(part)
            if match is None:
                raise UsageError(
                    f"topology {name!r}: part {part!r} is not <count><role>; "
                    "roles are P, D, pD and R, as in 2P_2D, 1P_3pD, 4R, 1R_1P_2D"
                )
            parts.append((int(match[1]), Role(match[2])))
        return cls(tuple(parts))

    def __str__(self) -> str:
        return "_".join(f"{count}{role}" for count, role in self.parts)

    def count(self, role: Role) -> int:
        return sum(count for count, has in self.parts if has is role)

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return tuple(
            NodeSpec(f"{role.lower()}{i}", role) for count, role in self.parts for i in range(count)
        )

    @property
    def homes(self) -> tuple[NodeSpec, ...]:
        """Nodes a conversation can live on: R, D and pD."""
        return tuple(node for node in self.nodes if node.role.decodes)

    @property
    def prefill_nodes(self) -> tuple[NodeSpec, ...]:
        return tuple(node for node in self.nodes if node.role is Role.P)

    def twin(self) -> Topology:
        """The same shape with every D a pD: the local side of a comparison.

        A D beside a pD is added to it (``1P_1D_2pD`` → ``1P_3pD``).
        """
        counts: dict[Role, int] = {}
        for count, role in self.parts:
            role_after = Role.PD if role is Role.D else role
            counts[role_after] = counts.get(role_after, 0) + count
        return Topology(tuple((count, role) for role, count in counts.items()))
