"""What the router counts of itself, on the board, so that any worker can show all of it."""

from __future__ import annotations

from bisect import bisect_left

from ppdbench.core.decision import Route
from ppdbench.router.board import Board

REASONS = (
    "turn1", "cold", "replica", "policy", "role", "share", "threshold", "table", "outside",
    "undecided", "one_sided", "interpolated", "failed", "default", "drift", "moved", "retry",
    "override", "alone", "other",
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
    "later_turns", "later_turns_home", "shadow_differs", "drift_alarm",
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

    def route(self, route: Route, reason: str) -> None:
        reason = reason if reason in REASONS else "other"
        self.board.add(f"route:{route}:{reason}")

    def outcome(self, outcome: str) -> None:
        self.board.add(f"outcome:{outcome}")

    def observe(self, name: str, seconds: float) -> None:
        self.board.add(f"{name}:{bisect_left(SECONDS, seconds)}")
        self.board.add(f"{name}:sum", seconds)
