"""Rules that hold under every policy."""

from __future__ import annotations

from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.topology import Role
from ppdbench.policy.base import Policy

REPLICA_HOME = Decision(Route.REPLICA, "replica")
TURN_1 = Decision(Route.REMOTE, "turn1")
COLD = Decision(Route.REMOTE, "cold")


def decide(policy: Policy, features: Features, home: Role, *, holds_kv: bool = True) -> Decision:
    """The one way to a decision in a sweep, in the simulator and in the router.

    ``holds_kv`` is false when the home is known to have lost the conversation's KV.
    """
    if home is Role.R:
        return REPLICA_HOME
    if features.turn <= 1:
        return TURN_1
    if not holds_kv:
        return COLD
    return policy.decide(features, home)
