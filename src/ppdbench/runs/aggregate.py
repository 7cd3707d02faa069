"""From turn records to the point's line in ``points.jsonl``. Definitions: ``docs/metrics.md``.

Everything is columns: a point of 160 turns costs some hundred microseconds, so that a grid of
half a million turns is not spent here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppdbench.core.conversation import Arrival, Conversation
from ppdbench.core.decision import Route
from ppdbench.core.statistics import QUANTILE_NAMES, row_means, row_quantiles
from ppdbench.runs import gates
from ppdbench.runs.points import PointKey, PointOutcome
from ppdbench.runs.records import Outcome, TurnRecord

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LATENCIES = ("ttft_s", "ttft_sent_s", "tpot_s", "e2e_s")
COUNTS = ("context_tokens", "new_tokens", "effective_new_tokens", "output_tokens")
TTFT_LIMITS_S = (0.1, 0.2, 0.5)
TPOT_LIMITS_S = (0.015, 0.03)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must meet to count as goodput."""

    ttft_s: float = 0.5
    tpot_s: float = 0.03


@dataclass(frozen=True, slots=True)
class Plan:
    """What was to happen at a point, so that a turn never sent is missed.

    ``shared_tokens`` says how many tokens of a Turn 1 a prefix cache may serve, by conversation.
    ``block_tokens`` is the KV block size, ``None`` where it is unknown.
    """

    conversations: int
    turns: int
    window_s: float
    shared_tokens: Mapping[str, int] = field(default_factory=dict)
    block_tokens: int | None = None

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], block_tokens: int | None = None) -> Plan:
        instants = [arrival.at_s for arrival in arrivals]
        plans = [arrival.conversation for arrival in arrivals]
        return cls(
            conversations=len(plans),
            turns=sum(len(plan.turns) for plan in plans),
            window_s=max(instants, default=0.0) - min(instants, default=0.0),
            shared_tokens=_shared_tokens(plans),
            block_tokens=block_tokens,
        )


def _shared_tokens(plans: Sequence[Conversation]) -> dict[str, int]:
    """By conversation, how many tokens of its opening stand before another one of the point, too.

    On purpose, or because people begin alike. A token is at least one byte of text.
    """
    shared = {plan.id: plan.shared_tokens for plan in plans if plan.shared_tokens}
    for openings in ([_opening_bytes(p) for p in plans], [_opening_ids(p) for p in plans]):
        known = sorted((o, p.id) for o, p in zip(openings, plans, strict=True) if o)
        for (one, a), (other, b) in pairwise(known):
            common = _common(one, other)
            for name in (a, b):
                shared[name] = max(shared.get(name, 0), common)
    return {name: tokens for name, tokens in shared.items() if tokens}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _opening_bytes(plan: Conversation) -> bytes:
    text = plan.turns[0].text
    return b"" if text is None else f"{plan.context_text or ''}\0{text}".encode()


def _opening_ids(plan: Conversation) -> tuple[int, ...]:
    ids = plan.turns[0].token_ids
    return () if ids is None else (plan.context_token_ids or ()) + ids


@dataclass(frozen=True, slots=True)
class Columns:
    """The records of a point, warm-up left out, as arrays of equal length; NaN is unknown."""

    turn: NDArray[np.int64]
    ok: Mask
    scheduled_s: Floats
    sent_s: Floats
    first_s: Floats
    finished_s: Floats
    prompt: Floats
    cached: Floats
    output: Floats
    wanted: Floats
    context: Floats
    new: Floats

    @classmethod
    def of(cls, records: Sequence[TurnRecord]) -> Columns:
        def column(values: Iterable[float | None]) -> Floats:
            return np.array(list(values), dtype=np.float64)

        return cls(
            turn=np.array([r.turn for r in records], dtype=np.int64),
            ok=np.array([r.ok for r in records], dtype=np.bool_),
            scheduled_s=column(r.scheduled_at_s for r in records),
            sent_s=column(r.sent_at_s for r in records),
            first_s=column(r.first_token_at_s for r in records),
            finished_s=column(r.finished_at_s for r in records),
            prompt=column(r.prompt_tokens for r in records),
            cached=column(r.cached_tokens for r in records),
            output=column(r.output_tokens for r in records),
            wanted=column(r.wanted_output_tokens for r in records),
            context=column(r.context_tokens for r in records),
            new=column(r.new_tokens for r in records),
        )

    @property
    def untimed(self) -> Mask:
        """Good turns whose answer came whole: nobody knows when its first token was there."""
        return self.ok & np.isnan(self.first_s)

    def latencies(self) -> Floats:
        """One row per name of :data:`LATENCIES`; NaN for a turn that has none."""
        decoded = np.where(self.output > 1, self.output - 1, np.nan)
        rows = np.stack(
            (
                self.first_s - self.scheduled_s,
                self.first_s - self.sent_s,
                (self.finished_s - self.first_s) / decoded,
                self.finished_s - self.scheduled_s,
            )
        )
        rows[:, ~self.ok] = np.nan
        return rows

    def counts(self) -> Floats:
        """One row per name of :data:`COUNTS`; of good turns only, as the latencies."""
        rows = np.stack((self.context, self.new, self.prompt - self.cached, self.output))
        rows[:, ~self.ok] = np.nan
        return rows


def aggregate(
    key: PointKey,
    seed: int,
    outcome: PointOutcome,
    plan: Plan,
    limits: Limits = Limits(),
) -> dict[str, Any]:
    """The point's object of ``points.jsonl``: no clock, host, path or pid in it."""
    records = [record for record in outcome.records if not record.warm_up]
    columns = Columns.of(records)
    classes = _classes(columns, records)
    lost = _lost_cache(records, plan.block_tokens)
    point = {
        "topology": key.topology,
        "policy": key.policy,
        "workload": key.workload,
        "rate_per_s": key.rate_per_s,
        "repeat": key.repeat,
        "seed": seed,
        **_success(columns, records, plan),
        **_throughput(columns, _window_s(columns, plan), limits),
        "bytes_moved": _fact_or_sum(outcome, "bytes_moved", records),
        "recomputed_tokens": _fact_or_sum(outcome, "recomputed_tokens", records),
        **lost,
        "counts_estimated": any(record.counts_estimated for record in records),
        "path_proven": outcome.facts.get("path_proven"),
        "client": client_lag(columns, outcome.facts),
        **classes,
    }
    evidence = gates.Evidence.of(point, columns, records, plan.shared_tokens, outcome.facts)
    return {**point, "validity": [str(code) for code in gates.validity(evidence)]}


def failed_point(key: PointKey, seed: int, cause: str, plan: Plan) -> dict[str, Any]:
    """A point that could not be measured, with its cause; it never votes."""
    outcome = PointOutcome([], {"engine_failed": cause})
    return {**aggregate(key, seed, outcome, plan), "cause": cause}


def _classes(columns: Columns, records: Sequence[TurnRecord]) -> dict[str, dict[str, Any]]:
    latencies, counts = columns.latencies(), columns.counts()
    itl = _inter_token_s(records)
    masks = {
        "turn1": columns.turn == 1,
        "turn2plus": columns.turn > 1,
        "all": np.ones(len(columns.turn), dtype=np.bool_),
    }
    return {
        name: _turn_class(columns, latencies, counts, itl, mask) for name, mask in masks.items()
    }


def _turn_class(
    columns: Columns,
    latencies: Floats,
    counts: Floats,
    itl: list[Floats] | None,
    mask: Mask,
) -> dict[str, Any]:
    failed = int(np.count_nonzero(mask & ~columns.ok))
    attempted = int(np.count_nonzero(mask))
    summaries = _summaries(np.concatenate((latencies, counts))[:, mask])
    chosen = latencies[:, mask]
    return {
        "n": attempted - failed,
        "turns": attempted,
        **dict(zip(LATENCIES + COUNTS, summaries, strict=True)),
        "itl_s": _inter_token_summary(itl, mask),
        "adjusted": _adjusted(chosen, columns.ok[mask]) if failed else _plain(summaries),
        "attainment": _attainment(chosen, failed),
    }


def _summaries(rows: Floats) -> list[dict[str, float | None]]:
    means, quantiles = row_means(rows).tolist(), row_quantiles(rows).tolist()
    return [
        {"mean": known(mean), **_named(row)} for mean, row in zip(means, quantiles, strict=True)
    ]


def _named(quantiles: Iterable[float]) -> dict[str, float | None]:
    return dict(zip(QUANTILE_NAMES, map(known, quantiles), strict=True))


def known(value: float) -> float | None:
    """JSON has neither NaN nor infinity; both mean that there is no such number."""
    return value if math.isfinite(value) else None


def _adjusted(latencies: Floats, ok: Mask) -> dict[str, dict[str, float | None]]:
    """Percentiles where a failed turn counts as longer than every good one."""
    with_failures = latencies.copy()
    with_failures[:, ~ok] = np.inf
    rows = row_quantiles(with_failures).tolist()
    return {name: _named(row) for name, row in zip(LATENCIES, rows, strict=True)}


def _plain(summaries: Sequence[dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    return {
        name: {q: summary[q] for q in QUANTILE_NAMES}
        for name, summary in zip(LATENCIES, summaries, strict=False)
    }


def _attainment(latencies: Floats, failed: int) -> dict[str, dict[str, float | None]]:
    """Share of the turns that failed or have this latency that kept each limit."""

    def shares(row: Floats, limits: Sequence[float]) -> dict[str, float | None]:
        judged = failed + int(np.count_nonzero(np.isfinite(row)))
        return {
            str(limit): float(np.count_nonzero(row <= limit)) / judged if judged else None
            for limit in limits
        }

    return {
        "ttft_s": shares(latencies[0], TTFT_LIMITS_S),
        "tpot_s": shares(latencies[2], TPOT_LIMITS_S),
    }


def _inter_token_s(records: Sequence[TurnRecord]) -> list[Floats] | None:
    """Gaps between tokens by record; ``None`` where nobody kept token instants."""
    if not any(len(record.token_at_s) > 1 for record in records):
        return None
    return [np.diff(np.asarray(r.token_at_s if r.ok else [], dtype=np.float64)) for r in records]


def _inter_token_summary(itl: list[Floats] | None, mask: Mask) -> dict[str, float | None] | None:
    if itl is None:
        return None
    chosen = [gaps for gaps, wanted in zip(itl, mask.tolist(), strict=True) if wanted]
    pooled = np.concatenate(chosen) if chosen else np.empty(0)
    return _summaries(pooled[None, :])[0]


def _success(columns: Columns, records: Sequence[TurnRecord], plan: Plan) -> dict[str, Any]:
    """By request over the turns planned: a turn never sent because an earlier one broke counts."""
    good = int(np.count_nonzero(columns.ok))
    planned = max(plan.turns, len(records))
    broken = {record.conversation for record in records if not record.ok}
    turns_ok = Counter(record.conversation for record in records if record.ok)
    conversations = max(plan.conversations, len(broken | turns_ok.keys()))
    whole = len(turns_ok.keys() - broken)
    causes = Counter(str(_cause(record)) for record in records if not record.ok)
    return {
        "conversations": conversations,
        "turns": planned,
        "success": good / planned if planned else 0.0,
        "success_conversations": whole / conversations if conversations else 0.0,
        "failures": {**causes, **_never_sent(planned - len(records))},
        "routes": dict(Counter(str(record.route) for record in records)),
    }


def _cause(record: TurnRecord) -> Outcome:
    """An OK turn without a token is a stream that brought nothing."""
    return Outcome.NO_FIRST_BYTE if record.outcome is Outcome.OK else record.outcome


def _never_sent(count: int) -> dict[str, int]:
    return {"never_sent": count} if count else {}


def _window_s(columns: Columns, plan: Plan) -> float:
    """First to last conversation arrival: what came, which in a closed loop nobody can plan."""
    begun = columns.scheduled_s[columns.turn == 1]
    return float(begun.max() - begun.min()) if len(begun) > 1 else plan.window_s


def _throughput(columns: Columns, window: float, limits: Limits) -> dict[str, Any]:
    """Of the steady window, first to last arrival; with the drain after it, apart."""
    start = float(columns.scheduled_s.min()) if len(columns.turn) else 0.0
    finished = np.where(columns.ok, columns.finished_s, np.nan)
    end = float(np.nanmax(finished, initial=start))
    latencies = columns.latencies()
    met = (latencies[0] <= limits.ttft_s) & ~(latencies[2] > limits.tpot_s)
    inside = finished <= start + window
    known_met = None if columns.untimed.any() else np.count_nonzero(inside & met)
    return {
        "window_s": window,
        "requests_per_s": _per_s(np.count_nonzero(inside), window),
        "output_tokens_per_s": _per_s(_tokens_before(columns, start + window), window),
        "goodput": {
            "ttft_s": limits.ttft_s,
            "tpot_s": limits.tpot_s,
            "requests_per_s": None if known_met is None else _per_s(known_met, window),
        },
        "with_drain": {
            "drain_s": max(0.0, end - start - window),
            "requests_per_s": _per_s(np.count_nonzero(columns.ok), end - start),
            "output_tokens_per_s": _per_s(_tokens_before(columns, math.inf), end - start),
        },
    }


def _per_s(amount: float | np.integer[Any], duration_s: float) -> float | None:
    return float(amount) / duration_s if duration_s > 0 else None


def _tokens_before(columns: Columns, end_s: float) -> float:
    """Output tokens by ``end_s``; those of a turn lie evenly from its first to its last token.

    All tokens of an answer that came whole lie at its end.
    """
    ok = columns.ok & ~np.isnan(columns.output) & ~np.isnan(columns.finished_s)
    firsts = np.where(columns.untimed, columns.finished_s, columns.first_s)
    first, finished, output = firsts[ok], columns.finished_s[ok], columns.output[ok]
    span = finished - first
    share = np.divide(end_s - first, span, out=np.full_like(span, np.inf), where=span > 0)
    begun = first <= end_s
    tokens = np.where(begun, 1 + np.clip(share, 0.0, 1.0) * (output - 1), 0.0)
    return float(tokens.sum())


def _fact_or_sum(
    outcome: PointOutcome, name: str, records: Sequence[TurnRecord]
) -> int | float | None:
    if outcome.facts.get(name) is not None:
        value: int | float = outcome.facts[name]
        return value
    amounts = [amount for r in records if (amount := getattr(r, name)) is not None]
    return sum(amounts) if amounts else None


def client_lag(columns: Columns, facts: Mapping[str, Any]) -> dict[str, float | None]:
    """How late the client itself was; from the records where the driver gave no figure."""
    send = facts.get("send_lag_p99_s")
    if send is None and len(columns.turn):
        lags = (columns.sent_s - columns.scheduled_s)[None, :]
        send = known(float(row_quantiles(lags, (0.99,))[0, 0]))
    return {"send_lag_p99_s": send, "loop_lag_p99_s": facts.get("loop_lag_p99_s")}


def _lost_cache(records: Sequence[TurnRecord], block_tokens: int | None) -> dict[str, int | None]:
    """Tokens that a later turn had to compute again although its node had held them.

    ``retokenised_tokens``: the loss begins inside the last reply, which is what a text history
    that re-tokenises looks like. ``cache_lost_tokens``: it begins before, so blocks were evicted
    or the node keeps none. ``None`` where the server did not say what it had cached.
    """
    losses = [
        loss
        for before, record in _successive(records)
        if (loss := _loss(before, record, block_tokens)) is not None
    ]
    if not losses:
        return {"retokenised_tokens": None, "cache_lost_tokens": None}
    retokenised = sum(tokens for tokens, in_reply in losses if in_reply)
    return {
        "retokenised_tokens": retokenised,
        "cache_lost_tokens": sum(tokens for tokens, _ in losses) - retokenised,
    }


def _successive(records: Sequence[TurnRecord]) -> Iterable[tuple[TurnRecord, TurnRecord]]:
    last: dict[str, TurnRecord] = {}
    for record in sorted(records, key=lambda r: r.turn):
        before = last.get(record.conversation)
        if before is not None and before.ok and record.ok:
            yield before, record
        last[record.conversation] = record


def _loss(
    before: TurnRecord, record: TurnRecord, block_tokens: int | None
) -> tuple[int, bool] | None:
    """Lost tokens, and whether the loss begins inside the last reply.

    Only a turn that stays where the KV is can lose it. The last token of a reply has no KV yet.
    """
    if block_tokens is None or record.route not in (Route.LOCAL, Route.REPLICA):
        return None
    prompt, output, cached = before.prompt_tokens, before.output_tokens, record.cached_tokens
    if prompt is None or output is None or cached is None:
        return None
    held = (prompt + output - 1) // block_tokens * block_tokens
    return max(0, held - cached), cached >= prompt // block_tokens * block_tokens
