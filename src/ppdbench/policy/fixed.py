"""Policies that need no measurement."""

from __future__ import annotations

from dataclasses import dataclass

from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.errors import UsageError
from ppdbench.core.seeds import unit_interval
from ppdbench.core.topology import Role


@dataclass(frozen=True, slots=True)
class AlwaysPolicy:
    """Every later turn by one route: ``remote``, ``local`` or ``pull``."""

    route: Route

    @property
    def name(self) -> str:
        return self.route.value

    def decide(self, features: Features, home: Role) -> Decision:  # noqa: ARG002
        return Decision(self.route, "policy")


@dataclass(frozen=True, slots=True)
class RolesPolicy:
    """By the home's role: D remote, pD local."""

    name: str = "roles"

    def decide(self, features: Features, home: Role) -> Decision:  # noqa: ARG002
        return Decision(Route.LOCAL if home is Role.PD else Route.REMOTE, "role")


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """A seeded fraction of later turns local; the lot depends on ``features.key`` alone."""

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(f"policy share:{self.share}: the share must lie between 0 and 1")

    @property
    def name(self) -> str:
        return f"share:{self.share:g}"

    def decide(self, features: Features, home: Role) -> Decision:  # noqa: ARG002
        local = unit_interval(features.key) < self.share
        return Decision(Route.LOCAL if local else Route.REMOTE, "share")


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """Local up to and including ``max_new_tokens``."""

    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UsageError(f"policy {self.name}: the threshold must not be negative")

    @property
    def name(self) -> str:
        return f"threshold:{self.max_new_tokens}"

    def decide(self, features: Features, home: Role) -> Decision:  # noqa: ARG002
        local = features.new_tokens <= self.max_new_tokens
        return Decision(Route.LOCAL if local else Route.REMOTE, "threshold")
