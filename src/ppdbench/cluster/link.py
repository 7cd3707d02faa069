"""A slow link on a fast machine: how much later a hand-off would have come.

The wait stands before D's request, so it delays this hand-off alone and none of D's other work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ppdbench.cluster.canary import Path, Prober, paths_of
from ppdbench.cluster.contract import ClusterSpec
from ppdbench.cluster.counters import read_node
from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError, UsageError

_PROBE_TOKENS = 1024
_COUNTED_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class SlowLink:
    """``bytes_per_s`` is the emulated rate; the rest was measured on the real one."""

    bytes_per_s: float
    kv_bytes_per_token: float
    real_s_per_byte: float
    block_tokens: int

    def delay_s(self, prompt_tokens: int, held_tokens: int) -> float:
        """max(0, bytes / rate − the time that the real transfer takes).

        NIXL moves the blocks that D lacks: all of the prompt's, less the whole blocks among the
        ``held_tokens`` that D has of this conversation.
        """
        lacking = -(-prompt_tokens // self.block_tokens) - held_tokens // self.block_tokens
        moved = max(0, lacking) * self.block_tokens * self.kv_bytes_per_token
        return max(0.0, moved / self.bytes_per_s - moved * self.real_s_per_byte)


def measure_link(
    cluster: ClusterSpec, model: str, block_tokens: int, bytes_per_s: float
) -> SlowLink:
    """Hand over one prompt twice and read what D counted; the second time is the one that counts.

    Raises:
        UsageError: the cluster has no P.
        EngineError: D does not say how many bytes it read.
    """
    path = next((p for p in paths_of(cluster, pull=False) if p.route is Route.REMOTE), None)
    if path is None:
        raise UsageError(
            f"--emulate-link: a {cluster.topology} cluster hands nothing over; use one with a P"
        )
    prober = Prober(model, seed=time.monotonic_ns() % 2**32)
    for _ in range(2):
        moved_bytes, transfer_s = _hand_over(prober, path)
    tokens = -(-_PROBE_TOKENS // block_tokens) * block_tokens
    return SlowLink(bytes_per_s, moved_bytes / tokens, transfer_s / moved_bytes, block_tokens)


def _hand_over(prober: Prober, path: Path) -> tuple[float, float]:
    before = read_node(path.node).counters
    prober.ask(path, prober.tokens(_PROBE_TOKENS), 2)
    deadline_s = time.monotonic() + _COUNTED_WITHIN_S
    while time.monotonic() < deadline_s:
        counted = read_node(path.node).counters.since(before)
        if counted.received_bytes and counted.transfer_s is not None:
            return counted.received_bytes, counted.transfer_s
        time.sleep(0.1)
    raise EngineError(
        f"--emulate-link: {path.node.name} counted no bytes for a hand-off of {_PROBE_TOKENS} "
        "tokens, so the delay cannot be computed; check that it is a D with NIXL"
    )
