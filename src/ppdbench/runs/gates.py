"""The rules that say a point may not vote. Pure; each is one line of ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.runs.validity import MIN_LATER_TURNS, MIN_SUCCESS, Validity

if TYPE_CHECKING:
    from ppdbench.runs.aggregate import Columns

CLIENT_LAG_FLOOR_S = 0.010
CLIENT_LAG_SHARE = 0.02
"""Of the median TTFT: a client may be late by that much, or by the floor if that is more."""

WRONG_LENGTH_SHARE = 0.01
"""Of the turns: an answer or two cut short by a stop token is no other workload."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the gates look at. ``None`` is unknown, and the unknown fires no gate."""

    success: float
    later_turns: int
    median_ttft_s: float | None
    send_lag_p99_s: float | None = None
    loop_lag_p99_s: float | None = None
    contaminated_turns: int = 0
    wrong_length_share: float = 0.0
    path_proven: bool | None = None
    engine_failed: str | None = None

    @classmethod
    def of(
        cls,
        point: Mapping[str, Any],
        columns: Columns,
        records: Sequence[TurnRecord],
        shared_tokens: Mapping[str, int],
        facts: Mapping[str, Any],
    ) -> Evidence:
        return cls(
            success=point["success"],
            later_turns=point["turn2plus"]["n"],
            median_ttft_s=point["all"]["ttft_s"]["p50"],
            contaminated_turns=contaminated_turns(records, shared_tokens),
            wrong_length_share=wrong_length_share(
                columns, records, prompts_are_ids=facts.get("prompts_are_ids") or False
            ),
            path_proven=facts.get("path_proven"),
            engine_failed=facts.get("engine_failed"),
            **point["client"],
        )


def validity(evidence: Evidence) -> list[Validity]:
    """The codes that hold, in the order in which :class:`Validity` names them."""
    return [code for code in Validity if GATES[code](evidence)]


def client_limited(evidence: Evidence) -> bool:
    """The client was late by more than 10 ms and more than 2 % of the median TTFT."""
    allowed = max(CLIENT_LAG_FLOOR_S, CLIENT_LAG_SHARE * (evidence.median_ttft_s or 0.0))
    lags = (evidence.send_lag_p99_s, evidence.loop_lag_p99_s)
    return any(lag is not None and lag > allowed for lag in lags)


def cache_contaminated(evidence: Evidence) -> bool:
    """A fresh conversation's first turn found tokens in a cache that had to be cold."""
    return evidence.contaminated_turns > 0


def path_unproven(evidence: Evidence) -> bool:
    """The engines' own counters disagree with the route that was asked for."""
    return evidence.path_proven is False


def wrong_lengths(evidence: Evidence) -> bool:
    """More than 1 % of the answers are not as long as the workload wanted."""
    return evidence.wrong_length_share > WRONG_LENGTH_SHARE


def engine_failed(evidence: Evidence) -> bool:
    """A node died, would not start, or did not answer its health check."""
    return evidence.engine_failed is not None


def errors(evidence: Evidence) -> bool:
    """Fewer than 95 % of the turns succeeded."""
    return evidence.success < MIN_SUCCESS


def too_few(evidence: Evidence) -> bool:
    """Fewer than 30 later turns succeeded."""
    return evidence.later_turns < MIN_LATER_TURNS


GATES: Mapping[Validity, Callable[[Evidence], bool]] = {
    Validity.CLIENT_LIMITED: client_limited,
    Validity.CACHE_CONTAMINATED: cache_contaminated,
    Validity.PATH_UNPROVEN: path_unproven,
    Validity.WRONG_LENGTHS: wrong_lengths,
    Validity.ENGINE_FAILED: engine_failed,
    Validity.ERRORS: errors,
    Validity.TOO_FEW: too_few,
}


def contaminated_turns(records: Sequence[TurnRecord], shared_tokens: Mapping[str, int]) -> int:
    """First turns that found more in the cache than they share with others of their point.

    A chat template puts the same tokens before every prompt: what the server counted beyond the
    workload's own tokens may be cached, too.
    """
    return sum(
        record.turn == 1
        and record.cached_tokens is not None
        and record.cached_tokens > shared_tokens.get(record.conversation, 0) + _template(record)
        for record in records
    )


def _template(record: TurnRecord) -> int:
    planned = record.context_tokens + record.new_tokens
    return max(0, (record.prompt_tokens or 0) - planned) if planned else 0


def wrong_length_share(
    columns: Columns, records: Sequence[TurnRecord], *, prompts_are_ids: bool = False
) -> float:
    """Turns whose answer, or whose prompt of ids, has another length than planned, as a share.

    Of a prompt of text only the server knows the length, so it has no plan to differ from. A
    prompt of ids is off by more than max(2, 1 %): the server did not take what was sent.
    """
    if not records:
        return 0.0
    told = sum(record.outcome is Outcome.WRONG_LENGTH for record in records)
    comparable = columns.ok & (columns.wanted > 0) & ~np.isnan(columns.output)
    wrong = comparable & (columns.output != columns.wanted)
    if prompts_are_ids:
        planned = columns.context + columns.new
        wrong |= columns.ok & (np.abs(columns.prompt - planned) > np.maximum(2, 0.01 * planned))
    return float(told + np.count_nonzero(wrong)) / len(records)
