"""What the router counts of itself, on the board, so that any worker can show all of it."""

from __future__ import annotations

from ppdbench.core.decision import Route
from ppdbench.router.board import Board, Tally
from ppdbench.router.memory import Memory

REASONS = (
    "turn1", "cold", "replica", "policy", "role", "share", "threshold", "table", "outside",
    "undecided", "one_sided", "interpolated", "failed", "default", "drift", "moved", "retry",
    "override", "alone", "no_pull", "other",
)  # fmt: skip
"""Reasons with a series of their own; a policy's further ones count as ``other``."""

OUTCOMES = (
    "ok", "upstream_4xx", "upstream_5xx", "broken", "timeout", "client_gone", "refused",
    "bad_request", "no_node",
)  # fmt: skip

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
HISTOGRAMS = ("ttft_s", "tpot_s", "decide_s")
PLAIN = (
    "in_flight", "retries", "releases", "torn", "evicted", "reloads", "reloads_failed",
    "shadow_differs", "drift_alarm",
    "kv_events", "kv_events_bad", "kv_events_gaps",
)  # fmt: skip


def metric_names() -> tuple[str, ...]:
    """Every name that :class:`Metrics` writes."""
    routes = (f"route:{route}:{reason}" for route in Route for reason in REASONS)
    outcomes = (f"outcome:{outcome}" for outcome in OUTCOMES)
    histograms = (
        f"{name}:{part}" for name in HISTOGRAMS for part in (*range(len(SECONDS) + 1), "sum")
    )
    return (*PLAIN, *routes, *outcomes, *histograms)


class Metrics:
    """Names on a board that mean something to an operator."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.in_flight = board.tally("in_flight")
        self._routes = {
            (route, reason): board.tally(f"route:{route}:{reason}")
            for route in Route
            for reason in REASONS
        }
        self._outcomes = {outcome: board.tally(f"outcome:{outcome}") for outcome in OUTCOMES}
        self.ttft_s, self.tpot_s, self.decide_s = (
            board.histogram(f"{name}:0", SECONDS) for name in HISTOGRAMS
        )
        self._followed = (0, 0)

    def follow(self, memory: Memory) -> None:
        """Count what ``memory`` has counted by itself since the last time."""
        evicted, torn = self._followed
        self.board.add("evicted", memory.evicted - evicted)
        self.board.add("torn", memory.torn - torn)
        self._followed = (memory.evicted, memory.torn)

    def route(self, route: Route, reason: str) -> Tally:
        """The count of turns that went this way; of a reason's words the first one counts."""
        tally = self._routes.get((route, reason))
        if tally is None:
            word = reason.partition(",")[0]
            tally = self._routes.get((route, word)) or self._routes[route, "other"]
        return tally

    def outcome(self, outcome: str) -> None:
        self._outcomes[outcome].add()
