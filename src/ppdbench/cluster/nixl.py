"""Bodies of the P→D hand-off as vLLM's NIXL connector wants them. Pure: no I/O, no clock.

The load client and the router both build their requests here, so a benchmarked hand-off is the
hand-off that is served. Order of a remote turn: :func:`prefill_body` to P, :func:`read_prefilled`
on its answer, :func:`decode_body` to D. Whoever got parameters from P and will not ask D after
all sends :func:`release_body` to a D, or P keeps the blocks until its lease runs out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppdbench.core.errors import EngineError

PARAMS = "kv_transfer_params"

_PREFILL_DROPS = frozenset(
    {
        PARAMS, "stream", "stream_options", "min_tokens", "n", "best_of", "use_beam_search",
        "logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids",
    }
)  # fmt: skip
"""Fields that mean something to the answer alone; P's one token is thrown away.

``prompt_logprobs`` and ``echo`` would moreover make P skip its prefix cache.
"""

_REMOTE_READ_FIELDS = ("remote_block_ids", "remote_engine_id", "remote_request_id")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P's answer: what D needs, and what P computed. Counts are ``None`` when P said nothing."""

    params: dict[str, Any]
    prompt_tokens: int | None
    cached_tokens: int | None

    @property
    def computed_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class HeldKv:
    """KV that a D still holds for a finished turn, and the exact tokens it stands for.

    ``token_ids`` are prompt + answer as ids. The last answer token has no KV yet, so
    ``params["remote_num_tokens"]`` is at most ``len(token_ids)``.
    """

    params: dict[str, Any]
    token_ids: tuple[int, ...]


def prefill_body(body: Mapping[str, Any], pull_from: HeldKv | None = None) -> dict[str, Any]:
    """The request to P: the client's ``body``, for one token, not streamed.

    With ``pull_from`` P first reads that KV from D; ask :func:`pull_refusal` before.
    """
    asked = {key: value for key, value in body.items() if key not in _PREFILL_DROPS}
    asked |= {"stream": False, "max_tokens": 1, PARAMS: _prefill_params(pull_from)}
    if "messages" in body:
        asked["max_completion_tokens"] = 1
    return asked


def _prefill_params(pull_from: HeldKv | None) -> dict[str, Any]:
    if pull_from is not None:
        return pull_from.params | {"do_remote_decode": True, "do_remote_prefill": False}
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def read_prefilled(answer: object) -> Prefilled:
    """Read P's answer, whatever JSON it is; counts of another shape are unknown.

    Raises:
        EngineError: the answer has no ``kv_transfer_params``, so D would silently compute alone.
    """
    answer = answer if isinstance(answer, dict) else {}
    params = answer.get(PARAMS)
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        raise EngineError(
            f"the prefill node answered without usable {PARAMS} (got {params!r}); start it with "
            "--kv-transfer-config naming NixlConnector, or route these turns local"
        )
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Prefilled(params, count_of(usage.get("prompt_tokens")), cached_tokens(usage))


def decode_body(body: Mapping[str, Any], prefilled: Prefilled) -> dict[str, Any]:
    """The request to D: the client's ``body`` unchanged, plus what P handed over."""
    return {**body, PARAMS: prefilled.params}


def local_body(body: Mapping[str, Any], *, hold_kv: bool = False) -> dict[str, Any]:
    """The request to a D or R that computes by itself; parameters a client sent are dropped.

    With ``hold_kv`` a D started for pulls keeps the KV and says so in its answer, as it does by
    itself after a remote turn.
    """
    asked = {key: value for key, value in body.items() if key != PARAMS}
    if hold_kv:
        asked[PARAMS] = {"do_remote_decode": False, "do_remote_prefill": False}
    return asked


def release_body(prefilled: Prefilled) -> dict[str, Any]:
    """A request that D refuses (unknown model, 4xx) and that frees P's blocks without a transfer.

    vLLM tells the connector of every refused request that carried parameters; the connector then
    notifies P. An engine that does not do so frees them when the lease runs out.
    """
    return {
        "model": "ppdbench-release-of-a-hand-off",
        "prompt": [0],
        "max_tokens": 1,
        "stream": False,
        PARAMS: prefilled.params,
    }


def held_kv(
    answer: Mapping[str, Any], prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> HeldKv | None:
    """What D's unstreamed answer offers to a later pull, ``None`` when it offers nothing."""
    params = answer.get(PARAMS)
    if not isinstance(params, dict) or not all(params.get(k) for k in _REMOTE_READ_FIELDS):
        return None
    return HeldKv(params, (*prompt_ids, *output_ids))


def pull_refusal(held: HeldKv | None, prompt_ids: Sequence[int] | None) -> str | None:
    """Why P may not read ``held`` for a prompt of ``prompt_ids``; ``None`` when it may.

    vLLM trusts the token count it is given and would take foreign KV with HTTP 200, so every
    token that D's blocks stand for must be the prompt's own.
    """
    if held is None:
        return "no_kv_offered"
    if prompt_ids is None:
        return "history_is_text"
    count = held.params.get("remote_num_tokens") or 0
    if not 0 < count <= min(len(held.token_ids), len(prompt_ids)):
        return "token_count"
    if tuple(prompt_ids[:count]) != held.token_ids[:count]:
        return "prefix_differs"
    return None


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """Prompt tokens that were not computed, as the server counted them; ``None`` if it did not."""
    details = usage.get("prompt_tokens_details")
    return count_of(details.get("cached_tokens")) if isinstance(details, dict) else None


def count_of(value: object) -> int | None:
    """``value`` where it can be a count of tokens, whatever a server sent."""
    return value if isinstance(value, int) and 0 <= value < 2**31 else None
