"""Costs from a GPU's data sheet: for any GPU, and where the measured library does not exist.

Each kind of work takes the longer of its arithmetic and its memory traffic, at the shares of the
peak that ``Efficiency`` names. Those shares were set once against the measured H100 tables;
``tests/unit/test_sim_roofline.py`` says how close that comes on other GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppdbench.sim.costs import CostTables
from ppdbench.sim.gpus import Gpu
from ppdbench.sim.models import ModelShape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 128, 512, 2048, 8192, 32768, 131072)
CHUNKS = (0, 16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PREFIXES = (0, 128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's peaks that vLLM's kernels reach, and time per layer's launches."""

    dense_compute: float = 0.80
    attention_compute: float = 0.60
    memory: float = 0.80
    layer_s: float = 6e-6


def roofline_costs(
    shape: ModelShape, card: Gpu, max_tokens: int, efficiency: Efficiency = Efficiency()
) -> CostTables:
    """Tabulate the roofline of one GPU without tensor parallelism."""
    roof = _Roof(shape, card, efficiency)
    return CostTables(
        dense_s=[0.0, *(roof.dense_s(n) for n in range(1, max_tokens + 1))],
        batches=BATCHES,
        contexts=CONTEXTS,
        decode_attention_s=[[roof.decode_s(b, c) for c in CONTEXTS] for b in BATCHES],
        chunks=CHUNKS,
        prefixes=PREFIXES,
        prefill_attention_s=[[roof.prefill_s(n, p) for p in PREFIXES] for n in CHUNKS],
        source=f"roofline of {card.name}",
    )


class _Roof:
    def __init__(self, shape: ModelShape, card: Gpu, efficiency: Efficiency) -> None:
        self._shape = shape
        self._dense_flops_per_s = card.flops_per_s * efficiency.dense_compute
        self._attention_flops_per_s = card.flops_per_s * efficiency.attention_compute
        self._bytes_per_s = card.bytes_per_s * efficiency.memory
        self._launches_s = shape.layers * efficiency.layer_s

    def dense_s(self, tokens: int) -> float:
        """Projections, feed-forward and the output layer, whose rows are the sequences'."""
        shape = self._shape
        active = max(1, shape.active_experts)
        per_layer = shape.attention_weights + shape.ffn_weights(active)
        flops = 2.0 * tokens * shape.layers * per_layer
        read = shape.layers * (shape.attention_weights + shape.ffn_weights(self._touched(tokens)))
        output = shape.vocabulary * shape.hidden
        weight_bytes = shape.bytes_per_value * (read + output)
        roof_s = max(flops / self._dense_flops_per_s, weight_bytes / self._bytes_per_s)
        return self._launches_s + roof_s

    def decode_s(self, batch: int, context: int) -> float:
        """Reading the KV of every sequence once."""
        return batch * context * self._shape.kv_bytes_per_token / self._bytes_per_s

    def prefill_s(self, new: int, prefix: int) -> float:
        """Causal attention of the new tokens over the prefix and themselves."""
        shape = self._shape
        pairs = new * (prefix + new / 2)
        flops = 4.0 * pairs * shape.heads * shape.head_size * shape.layers
        kv_bytes = (prefix if new else 0) * shape.kv_bytes_per_token
        return max(flops / self._attention_flops_per_s, kv_bytes / self._bytes_per_s)

    def _touched(self, tokens: int) -> int:
        """Experts that at least one of the tokens needs, when each picks its own at random."""
        shape = self._shape
        if not shape.experts:
            return 1
        idle = (1 - shape.active_experts / shape.experts) ** tokens
        return round(shape.experts * (1 - idle))
