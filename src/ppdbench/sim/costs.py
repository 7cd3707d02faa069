"""What a step costs on the GPU: one tabulated form for every source of costs.

A step computes ``new`` tokens of some prompts and one token of each decoding sequence. Its time is
``dense(tokens) + Σ prefill attention + decode attention``: dense layers see only how many tokens
there are, attention sees what stands before them. Host time is not in here (``config.Overheads``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Decode attention near one mean context: ``at_s`` there, rising by ``slope_s`` per token.

    It holds for ``tokens`` more tokens of mean context.
    """

    at_s: float
    slope_s: float
    tokens: float


class CostTables:
    """Tables in seconds; look-ups interpolate linearly and continue the last cell beyond the edge.

    Args:
        dense_s: by number of tokens in the step, index 0 unused.
        batches: increasing batch sizes of ``decode_attention_s``' rows, from 1.
        contexts: increasing mean contexts of its columns, from 0.
        decode_attention_s: ``[batch][context]``.
        chunks: increasing new-token counts of ``prefill_attention_s``' rows, from 0.
        prefixes: increasing prefix lengths of its columns, from 0.
        prefill_attention_s: ``[chunk][prefix]``.
        source: where the numbers come from, for manifests.
    """

    def __init__(  # noqa: PLR0913 - one table each
        self,
        *,
        dense_s: Sequence[float],
        batches: Sequence[int],
        contexts: Sequence[int],
        decode_attention_s: Sequence[Sequence[float]],
        chunks: Sequence[int],
        prefixes: Sequence[int],
        prefill_attention_s: Sequence[Sequence[float]],
        source: str,
    ) -> None:
        self.source = source
        self._dense = list(dense_s)
        self._batches, self._contexts = list(batches), list(contexts)
        self._decode = [list(row) for row in decode_attention_s]
        self._chunks, self._prefixes = list(chunks), list(prefixes)
        self._prefill = [list(row) for row in prefill_attention_s]
        self._rows: dict[int, list[float]] = {}
        self._seen: dict[tuple[int, int], float] = {}
        self._slowed: dict[float, CostTables] = {}

    def dense_s(self, tokens: int) -> float:
        """Everything but attention, for ``tokens`` ≥ 1 tokens in one step."""
        if tokens < len(self._dense):
            return self._dense[tokens]
        last = len(self._dense) - 1
        return self._dense[last] + (tokens - last) * (self._dense[last] - self._dense[last - 1])

    def decode_line(self, batch: int, mean_context: float) -> Line:
        """Attention of ``batch`` decoding sequences around a mean context."""
        row = self._rows.get(batch) or self._row(batch)
        left = min(bisect_right(self._contexts, mean_context), len(self._contexts) - 1) - 1
        low, high = self._contexts[left], self._contexts[left + 1]
        slope = (row[left + 1] - row[left]) / (high - low)
        tokens = high - mean_context if left + 2 < len(self._contexts) else float("inf")
        return Line(row[left] + slope * (mean_context - low), slope, tokens)

    def prefill_attention_s(self, new: int, prefix: int) -> float:
        """Attention of ``new`` prompt tokens that stand after ``prefix`` others."""
        seconds = self._seen.get((new, prefix))
        if seconds is None:
            seconds = self._seen[new, prefix] = self._bilinear(new, prefix)
        return seconds

    def stretched(self, factor: float, decode_factor: float = 1.0) -> CostTables:
        """The same with compute-bound work slower by ``factor``.

        That is what dense layers take beyond one token's time, which is reading the weights, and
        the attention of prompts. Attention of decoding sequences is slower by ``decode_factor``.
        """
        one = self._dense[1]
        return CostTables(
            dense_s=[0.0, *(one + (seconds - one) * factor for seconds in self._dense[1:])],
            batches=self._batches,
            contexts=self._contexts,
            decode_attention_s=[[s * decode_factor for s in row] for row in self._decode],
            chunks=self._chunks,
            prefixes=self._prefixes,
            prefill_attention_s=[[s * factor for s in row] for row in self._prefill],
            source=self.source,
        )

    def slowed(self, factor: float) -> CostTables:
        """The same with everything but the reading of weights slower by ``factor``.

        It is kept: each of many points asks for it again.
        """
        if factor not in self._slowed:
            self._slowed[factor] = self.stretched(factor, factor)
        return self._slowed[factor]

    def _row(self, batch: int) -> list[float]:
        left, share = _cell(self._batches, batch)
        low, high = self._decode[left], self._decode[left + 1]
        row = [a + share * (b - a) for a, b in zip(low, high, strict=True)]
        self._rows[batch] = row
        return row

    def _bilinear(self, new: int, prefix: int) -> float:
        i, u = _cell(self._chunks, new)
        j, v = _cell(self._prefixes, prefix)
        low, high = self._prefill[i], self._prefill[i + 1]
        below = low[j] + v * (low[j + 1] - low[j])
        above = high[j] + v * (high[j + 1] - high[j])
        return max(0.0, below + u * (above - below))


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    left = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return left, (value - axis[left]) / (axis[left + 1] - axis[left])
