"""All that a router is told, from options and environment, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds per phase.

    ``prefill`` is P's whole answer, ``first_byte`` D's or R's first, and ``silence`` the longest
    gap inside a stream.
    """

    prefill_s: float = 600.0
    first_byte_s: float = 600.0
    silence_s: float = 600.0

    def __post_init__(self) -> None:
        for phase in ("prefill", "first_byte", "silence"):
            limit_s = getattr(self, f"{phase}_s")
            if not 0 < limit_s < math.inf:
                option = f"--{phase.replace('_', '-')}-timeout-s"
                raise UsageError(f"{option} is {limit_s:g}; it must be a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class HealthRule:
    """Every ``every_s`` a node is asked.

    ``down_after`` failures in a row take it out, ``up_after`` good answers in a row bring it back.
    """

    every_s: float = 5.0
    timeout_s: float = 5.0
    down_after: int = 3
    up_after: int = 2


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """``policy`` is a policy's name; ``shadow`` one that is only asked and logged.

    ``count_tokens`` counts a text as the served model does; without it counts are estimated.
    """

    cluster: ClusterSpec
    policy: str
    shadow: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_in_flight: int = 4096
    max_body_bytes: int = 32 * 1024 * 1024
    max_notes: int = 131_072
    allow_mismatch: bool = False
    allow_override: bool = False
    client_keys: tuple[str, ...] = field(default=(), repr=False)
    decisions_log: Path | None = None
    state_file: Path | None = None
    count_tokens: Callable[[str], int] | None = field(default=None, repr=False)
    timeouts: Timeouts = Timeouts()
    health: HealthRule = HealthRule()
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("workers", "max_in_flight", "max_body_bytes", "max_notes"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} is {getattr(self, name)}; it must be at least 1")
        if not self.host:
            raise UsageError(
                "--host is empty, which would mean every address; write 127.0.0.1, or 0.0.0.0"
            )
        if self.workers > 1 and self.port == 0:
            raise UsageError(
                f"--workers {self.workers} with --port 0: each would take another port; name one"
            )
