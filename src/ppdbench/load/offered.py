"""How much load a list of arrivals is: what a client has to prepare for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppdbench.core.conversation import Arrival


@dataclass(frozen=True, slots=True)
class Offered:
    """Means from the first arrival to the last. Both 0 where all arrive at one instant."""

    turns_per_s: float
    tokens_per_s: float


def offered_by(arrivals: Sequence[Arrival]) -> Offered:
    """Every turn counts at its conversation's arrival; replies as long as they may be."""
    instants = [arrival.at_s for arrival in arrivals]
    window_s = max(instants, default=0.0) - min(instants, default=0.0)
    if window_s <= 0:
        return Offered(0.0, 0.0)
    turns = [turn for arrival in arrivals for turn in arrival.conversation.turns]
    return Offered(len(turns) / window_s, sum(turn.output_tokens for turn in turns) / window_s)
