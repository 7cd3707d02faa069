"""What an engine can hold and whether its cache can be believed, found out before the run."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ppdbench.core.errors import EngineError, UsageError
from ppdbench.experiments.microbench.live import LiveEngine
from ppdbench.experiments.microbench.plan import Limits
from ppdbench.experiments.microbench.script import Ask, Segment
from ppdbench.http.messages import Request
from ppdbench.runs.records import TurnRecord

CROWD_TOKENS = 128
PROBE_TOKENS = 1024
"""Longer than any block in use (vLLM: 16 on GPU, 128 on CPU)."""


async def look(engine: LiveEngine, crowds: Iterable[int] = ()) -> Limits:
    """Context, KV and block size as the engine tells them; proves its prefix cache by probing.

    ``crowds`` are numbers of requests that should run at a time. The largest that really do is
    the batch limit, because no engine tells its own.

    Raises:
        EngineError: no prefix caching, or cached tokens that are missing or wrong.
        UsageError: the model is not served there.
    """
    context = await _max_model_len(engine)
    blocks, block_tokens, kv_bytes = _cache_facts(await _metrics(engine))
    found = await _probe(engine, min(PROBE_TOKENS, (context or PROBE_TOKENS) // 2))
    block_tokens = block_tokens or found
    kv_tokens = None if blocks is None else blocks * block_tokens
    per_token = kv_bytes // kv_tokens if kv_bytes and kv_tokens else None
    return Limits(context, kv_tokens, await _crowd(engine, crowds), block_tokens, per_token)


async def _crowd(engine: LiveEngine, crowds: Iterable[int]) -> int | None:
    """The largest of ``crowds`` that the engine runs at a time; 0 when it runs none of them."""
    sizes = sorted(set(crowds), reverse=True)
    for size in sizes:
        crowd = Crowd(size)
        await engine.run(crowd)
        if crowd.fits:
            return size
    return 0 if sizes else None


class Crowd:
    """Short prompts all at once: they fit when each has a token before any has its last."""

    def __init__(self, size: int) -> None:
        self.done = False
        self.fits = False
        self.wanted_pace = 1
        self._size = size

    def begin(self) -> list[Ask]:
        return [
            Ask(f"crowd{i}", (Segment(f"crowd/{i}", 8),), CROWD_TOKENS, paces=True)
            for i in range(self._size)
        ]

    def progressed(self, pace: int) -> list[Ask]:
        self.fits = self.done = pace >= self.wanted_pace
        return []

    def ended(self, name: str) -> list[Ask]:  # noqa: ARG002
        self.done = True
        return []


async def _max_model_len(engine: LiveEngine) -> int | None:
    answer = await engine.pool.fetch(engine.origin, Request("GET", "/v1/models"))
    if not answer.ok:
        raise EngineError(f"{engine.origin}/v1/models answered {answer.head.status}; is it vLLM?")
    served = {card["id"]: card for card in answer.json().get("data", [])}
    if engine.model not in served:
        raise UsageError(
            f"model {engine.model!r} is not served at {engine.origin}; it serves "
            f"{', '.join(sorted(served)) or 'nothing'}: give --model"
        )
    limit = served[engine.model].get("max_model_len")
    return None if limit is None else int(limit)


async def _metrics(engine: LiveEngine) -> str:
    answer = await engine.pool.fetch(engine.origin, Request("GET", "/metrics"))
    return answer.body.decode(errors="replace") if answer.ok else ""


def _cache_facts(metrics: str) -> tuple[int | None, int | None, int | None]:
    """KV blocks, tokens per block and KV bytes from vLLM's ``cache_config_info``, if it has them.

    Raises:
        EngineError: the engine says that its prefix caching is off.
    """
    line = next((x for x in metrics.splitlines() if x.startswith("vllm:cache_config_info{")), "")
    facts = dict(re.findall(r'(\w+)="([^"]*)"', line))
    if facts.get("enable_prefix_caching") == "False":
        raise EngineError(
            "the engine runs without prefix caching, so an append cannot be told from a full "
            "prefill; start it with --enable-prefix-caching"
        )
    names = ("num_gpu_blocks", "block_size", "kv_cache_memory_bytes")
    blocks, block_tokens, kv_bytes = (_count(facts.get(name)) for name in names)
    return blocks, block_tokens, kv_bytes


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


class _Probe:
    """A script of one request after the other."""

    def __init__(self, asks: list[Ask]) -> None:
        self.done = False
        self.wanted_pace = 0
        self._left = asks

    def begin(self) -> list[Ask]:
        return [self._left.pop(0)]

    def progressed(self, pace: int) -> list[Ask]:  # noqa: ARG002
        return []

    def ended(self, name: str) -> list[Ask]:  # noqa: ARG002
        self.done = not self._left
        return [] if self.done else [self._left.pop(0)]


async def _probe(engine: LiveEngine, tokens: int) -> int:
    """A cold prompt, the same again, another: returns the block size that explains the counts."""
    first, other = (Segment(f"probe/{name}", tokens) for name in ("first", "other"))
    asks = [Ask("cold", (first,), 1), Ask("warm", (first,), 1), Ask("other", (other,), 1)]
    cold, warm, unrelated = await engine.run(_Probe(asks))
    return judge_probe(cold, warm, unrelated, tokens)


def judge_probe(cold: TurnRecord, warm: TurnRecord, other: TurnRecord, tokens: int) -> int:
    """The unit in which the engine caches, as far as three prompts can show it.

    ``cold`` may have met what an earlier run left behind; ``other`` too. Only ``warm`` must hit.

    Raises:
        EngineError: the counts are missing, or cannot be true.
    """
    counts = [record.cached_tokens for record in (cold, warm, other)]
    if warm.cached_tokens is None:
        raise EngineError(
            "the engine does not say how many prompt tokens were cached, so no append can be "
            "proven; start vLLM with --enable-prompt-tokens-details"
        )
    if warm.cached_tokens == 0:
        raise EngineError(
            f"a prompt of {tokens} tokens sent twice found nothing cached; the engine runs "
            "without prefix caching: start it with --enable-prefix-caching"
        )
    if warm.cached_tokens >= tokens or warm.prompt_tokens != tokens:
        raise EngineError(
            f"the engine counts {warm.cached_tokens} cached of {warm.prompt_tokens} prompt tokens "
            f"for a prompt of {tokens}; at least one must be computed. Its counts cannot be used"
        )
    if other.cached_tokens and cold.cached_tokens == 0:
        raise EngineError(
            f"the engine counts {other.cached_tokens} cached tokens for a prompt it never saw "
            f"(cold, warm, other: {counts}); its counts cannot be used"
        )
    return tokens - warm.cached_tokens


__all__ = ["PROBE_TOKENS", "judge_probe", "look"]
