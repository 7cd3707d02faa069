"""What the P→D hop costs: TTFT of equal prompts on one node, through P→D, and local. Pure.

A prompt of T tokens, a share of them cached, is the second turn of a conversation whose first turn
was the cached part; with nothing cached it is a first turn. The hop is what the way through P→D
takes longer than the same computation on the node that decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import UsageError
from ppdbench.core.seeds import rng_for, seed_for
from ppdbench.core.statistics import bootstrap, mean_interval
from ppdbench.experiments.microbench.measure import interval_of
from ppdbench.runs.records import TurnRecord

Floats = NDArray[np.float64]

ONE_NODE, LOCAL, REMOTE = "one_node", "local", "remote"
WAYS = (ONE_NODE, LOCAL, REMOTE)

DEFAULT_TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
OUTPUT_TOKENS = 4
THINK_S = 0.1
"""Between the turns, so that the first turn's blocks are settled everywhere."""

MEASURED, LOADING, WARMING = "hop", "load", "warm"


@dataclass(frozen=True, slots=True)
class Prompt:
    """``cached`` of its ``tokens`` are there already, a multiple of the cache's block."""

    tokens: int
    cached: int

    @property
    def lacking(self) -> int:
        return self.tokens - self.cached


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Prompt lengths × cached shares, idle and beside ``load_streams`` decodes.

    ``gap_s`` lies between two measured conversations, ``wave_s`` between two waves of decodes of
    ``load_output_tokens``; rows say how many decodes really ran beside a measured prompt.
    """

    tokens: tuple[int, ...] = DEFAULT_TOKENS
    shares: tuple[float, ...] = (0.0, 0.5, 0.9)
    load_streams: tuple[int, ...] = (0, 8)
    load_output_tokens: int = 512
    gap_s: float = 4.0
    wave_s: float = 4.0
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens) < 2 or not all(0 <= share < 1 for share in self.shares):
            raise UsageError(
                f"prompts need at least 2 tokens and shares lie in [0, 1); got {self.tokens} and "
                f"{self.shares}"
            )
        if min(self.load_streams) < 0 or self.repeats < 1:
            raise UsageError(
                "decodes beside the hand-off are counts from 0 and repeats from 1; got "
                f"{self.load_streams} and {self.repeats}"
            )

    def prompts(self, block_tokens: int, limit: int | None) -> list[Prompt]:
        """Those that the context limit allows; cached parts are cut to whole blocks.

        Raises:
            UsageError: none fits.
        """
        found = {
            Prompt(tokens, int(share * tokens) // block_tokens * block_tokens)
            for tokens, share in product(self.tokens, self.shares)
            if limit is None or tokens + OUTPUT_TOKENS <= limit
        }
        if not found:
            raise UsageError(
                f"no prompt of {self.tokens} tokens fits the engine's context of {limit}; "
                "ask for shorter ones with --tokens"
            )
        return sorted(found, key=lambda prompt: (prompt.tokens, prompt.cached))

    def arrivals(self, prompts: Sequence[Prompt], repeat: int, streams: int) -> list[Arrival]:
        """Prompts one after the other in an order of the seed, and decodes to load the node."""
        order = rng_for(self.seed, "hop", repeat).permutation(len(prompts))
        measured = [
            Arrival(place * self.gap_s + self.gap_s / 2, _conversation(prompts[i]))
            for place, i in enumerate(order)
        ]
        return sorted([*measured, *self._load(len(prompts), streams)], key=lambda a: a.at_s)

    def warm_up(self, prompts: Sequence[Prompt]) -> list[Arrival]:
        """One cold prompt and one later turn of contents that nothing measured ever has."""
        return [
            Arrival(place * self.gap_s, replace(_conversation(prompt), id=f"{WARMING}/{place}"))
            for place, prompt in enumerate((prompts[0], prompts[-1]))
        ]

    def _load(self, measured: int, streams: int) -> Iterator[Arrival]:
        """Waves of decodes, so that some are always in mid-course."""
        waves = ceil(measured * self.gap_s / self.wave_s)
        for wave, stream in product(range(waves), range(streams)):
            turn = Turn(new_tokens=64, output_tokens=self.load_output_tokens)
            name = f"{LOADING}/{wave}/{stream}"
            yield Arrival(wave * self.wave_s, Conversation(name, (turn,)))


CPU_PLAN = HandoffPlan(
    tokens=(128, 512, 1024, 2048, 4096), load_streams=(0, 4), gap_s=0.6, wave_s=2.4
)
"""What a laptop measures in a few minutes."""


def _conversation(prompt: Prompt) -> Conversation:
    """The measured prompt is the last turn; the history of one before it is exactly cached."""
    name = f"{MEASURED}/{prompt.tokens}/{prompt.cached}"
    if not prompt.cached:
        return Conversation(name, (Turn(prompt.tokens, OUTPUT_TOKENS),))
    # The first turn's one token of reply has no KV yet and counts as lacking.
    first = Turn(prompt.cached, 1)
    return Conversation(name, (first, Turn(max(1, prompt.lacking - 1), OUTPUT_TOKENS, THINK_S)))


@dataclass(frozen=True, slots=True)
class Hop:
    """TTFT of one prompt by one way in one repeat, beside how many decodes."""

    prompt: Prompt
    way: str
    streams: int
    repeat: int
    ttft_s: float
    cached_tokens: int | None
    running: float


def read_hops(records: Sequence[TurnRecord], way: str, streams: int, repeat: int) -> Iterator[Hop]:
    """The measured turns of one point. A cold prompt has no local way: nothing is there."""
    loads = [r for r in records if r.conversation.startswith(LOADING) and r.ok]
    for record in records:
        name, _, rest = record.conversation.partition("/")
        if name != MEASURED or not record.ok or record.ttft_sent_s is None:
            continue
        tokens, cached = (int(part) for part in rest.split("/"))
        prompt = Prompt(tokens, cached)
        if record.turn == (2 if cached else 1) and (cached or way != LOCAL):
            running = float(sum(_beside(load, record) for load in loads))
            yield Hop(
                prompt, way, streams, repeat, record.ttft_sent_s, record.cached_tokens, running
            )


def _beside(load: TurnRecord, record: TurnRecord) -> bool:
    begun, ended = load.first_token_at_s or 0.0, load.finished_at_s or 0.0
    return begun <= record.sent_at_s <= ended


def hop_rows(hops: Iterable[Hop]) -> list[dict[str, Any]]:
    """One row per way, load and prompt: mean TTFT with its interval over repeats."""
    groups: dict[tuple[int, str, Prompt], list[Hop]] = {}
    for hop in hops:
        groups.setdefault((hop.streams, hop.way, hop.prompt), []).append(hop)
    order = sorted(groups, key=lambda k: (k[0], WAYS.index(k[1]), k[2].tokens, k[2].cached))
    return [_hop_row(key, groups[key]) for key in order]


def _hop_row(key: tuple[int, str, Prompt], hops: Sequence[Hop]) -> dict[str, Any]:
    streams, way, prompt = key
    ttft = mean_interval([hop.ttft_s for hop in hops])
    counts = [hop.cached_tokens for hop in hops if hop.cached_tokens is not None]
    return {
        "way": way,
        "load_streams": streams,
        "running_mean": fmean(hop.running for hop in hops),
        "prompt_tokens": prompt.tokens,
        "context_tokens": prompt.cached,
        "new_tokens": prompt.lacking,
        "repeats": len(hops),
        "ttft_s": ttft.estimate,
        "ttft_ci": interval_of(ttft),
        "cached_tokens_min": min(counts, default=None),
        "cached_tokens_max": max(counts, default=None),
    }


@dataclass(frozen=True, slots=True)
class Paired:
    """Hop seconds of one prompt, a value per repeat, and the tokens that had to move."""

    moved_tokens: int
    hop_s: Floats


def pair_up(hops: Iterable[Hop], streams: int, *, delta: bool) -> list[Paired]:
    """TTFT through P→D less TTFT of the same computation on the decoding node, repeat by repeat.

    ``delta`` connectors move what D lacks, the others the whole prompt.
    """
    at = {(h.prompt, h.way, h.repeat): h.ttft_s for h in hops if h.streams == streams}
    pairs = []
    for prompt in sorted({key[0] for key in at}, key=lambda p: (p.tokens, p.cached)):
        beside = LOCAL if prompt.cached else ONE_NODE
        repeats = sorted(r for p, way, r in at if p == prompt and way == REMOTE)
        values = [
            at[prompt, REMOTE, r] - at[prompt, beside, r]
            for r in repeats
            if (prompt, beside, r) in at
        ]
        if values:
            moved = prompt.lacking if delta else prompt.tokens
            pairs.append(Paired(moved, np.array(values)))
    return pairs


def fit_hop(
    pairs: Sequence[Paired], bytes_per_token: float | None, seed: int
) -> dict[str, Any] | None:
    """Fixed and per-token cost by least squares, with intervals over repeats, and residuals.

    ``None`` with fewer than three prompts or two repeats. Effective bandwidth is the bytes of a
    token over its cost, ``None`` where the cost is not above 0 or the bytes are unknown.
    """
    repeats = min((len(p.hop_s) for p in pairs), default=0)
    if len(pairs) < 3 or repeats < 2:
        return None
    moved = np.array([float(p.moved_tokens) for p in pairs])
    columns = [p.hop_s[:repeats] for p in pairs]

    def coefficient(place: int) -> Any:  # noqa: ANN401  (scipy wants a plain callable)
        def statistic(*sample: Floats, axis: int = -1) -> Floats:
            means = np.stack([column.mean(axis) for column in sample])
            return np.asarray(np.polyfit(moved, means.reshape(len(moved), -1), 1)[place]).reshape(
                means.shape[1:]
            )

        return statistic

    fixed, slope = (bootstrap(columns, coefficient(i), seed=seed_for(seed, i)) for i in (1, 0))
    predicted = fixed.estimate + slope.estimate * moved
    actual = np.array([column.mean() for column in columns])
    per_token_s = slope.estimate
    known = bytes_per_token is not None and slope.low > 0
    return {
        "fixed_s": fixed.estimate,
        "fixed_ci": interval_of(fixed),
        "per_token_s": per_token_s,
        "per_token_ci": interval_of(slope),
        "bytes_per_token": bytes_per_token,
        "bandwidth_bytes_per_s": (bytes_per_token or 0) / per_token_s if known else None,
        "r_squared": _r_squared(actual, predicted),
        "residuals": [
            {"moved_tokens": p.moved_tokens, "hop_s": float(a), "residual_s": float(a - b)}
            for p, a, b in zip(pairs, actual, predicted, strict=True)
        ],
        "residual_median_s": float(np.median(np.abs(actual - predicted))),
    }


def _r_squared(actual: Floats, predicted: Floats) -> float | None:
    spread = float(((actual - actual.mean()) ** 2).sum())
    return None if spread == 0 else 1 - float(((actual - predicted) ** 2).sum()) / spread


def hop_finding(fits: dict[str, Any]) -> str:
    """In words, per load."""
    parts = []
    for streams, fit in fits.items():
        beside = "idle" if streams == "0" else f"beside {streams} decodes"
        if fit is None:
            parts.append(f"{beside}: too few prompts or repeats for a fit")
            continue
        low, high = fit["fixed_ci"]
        rate = fit["bandwidth_bytes_per_s"]
        speed = "not resolved from 0" if rate is None else f"{rate / 1e9:.2f} GB/s effective"
        parts.append(
            f"{beside}: the hop costs {fit['fixed_s'] * 1e3:.1f} ms "
            f"({low * 1e3:.1f} … {high * 1e3:.1f}) and {fit['per_token_s'] * 1e6:.2f} µs per moved "
            f"token ({speed})"
        )
    return "; ".join(parts) + "."
