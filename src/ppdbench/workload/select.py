"""Which of the cleaned conversations a workload uses."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from ppdbench.core.errors import WorkloadError
from ppdbench.core.seeds import unit_interval
from ppdbench.workload.account import Account
from ppdbench.workload.chat import Chat


@dataclass(frozen=True, slots=True)
class Selection:
    """Limits on what is used; ``None`` and empty mean no limit.

    ``max_turns`` and ``max_context_tokens`` cut a conversation to its beginning (context there
    is all that a turn holds, its reply included); ``max_input_tokens`` and ``max_output_tokens``
    drop it whole, because its later turns would stand on a turn that never was. ``sample`` keeps
    that many, drawn by ``seed`` from the ids alone, whatever their order.
    """

    min_turns: int = 1
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_context_tokens: int | None = None
    languages: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    drop_toxic: bool = False
    drop_redacted: bool = False
    sample: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_turns is not None and self.max_turns < self.min_turns:
            raise WorkloadError(
                f"at least {self.min_turns} and at most {self.max_turns} turns were asked for; "
                "no conversation is both, so lower the minimum or raise the maximum"
            )

    @property
    def needs_tokens(self) -> bool:
        limits = (self.max_input_tokens, self.max_output_tokens, self.max_context_tokens)
        return any(limit is not None for limit in limits)

    def without_tokens(self) -> Selection:
        """The part that can be applied before anything is counted, so that less is counted."""
        if not self.needs_tokens:
            return self
        return replace(
            self,
            max_turns=None,
            max_input_tokens=None,
            max_output_tokens=None,
            max_context_tokens=None,
            sample=None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


EVERYTHING = Selection()


def select(chats: Iterable[Chat], selection: Selection, account: Account) -> Iterator[Chat]:
    """Those that pass, in the order they came (a sample: in the order it was drawn)."""
    passing = _passing(chats, selection, account)
    return passing if selection.sample is None else _sampled(passing, selection, account)


def _passing(chats: Iterable[Chat], selection: Selection, account: Account) -> Iterator[Chat]:
    languages = {language.casefold() for language in selection.languages}
    for chat in chats:
        reason = _property_reason(chat, selection, languages) or _length_reason(
            chat, selection, account
        )
        if reason:
            _drop(chat, reason, account)
        else:
            yield chat


def _property_reason(chat: Chat, selection: Selection, languages: set[str]) -> str:
    if languages and (chat.language or "").casefold() not in languages:
        return "language"
    if selection.models and chat.model not in selection.models:
        return "model"
    if selection.drop_toxic and chat.toxic:
        return "toxic"
    return "redacted" if selection.drop_redacted and chat.redacted else ""


def _length_reason(chat: Chat, selection: Selection, account: Account) -> str:
    """Too long turns first, then the cuts, then whether enough is left."""
    if selection.max_input_tokens and max(chat.new_tokens) > selection.max_input_tokens:
        return "input_too_long"
    if selection.max_output_tokens and max(chat.output_tokens) > selection.max_output_tokens:
        return "output_too_long"
    if chat.turns < selection.min_turns:
        return "too_few_turns"
    fitting = _turns_that_fit(chat, selection.max_context_tokens)
    if fitting < selection.min_turns:
        return "context_too_long"
    allowed = min(fitting, selection.max_turns or fitting)
    account.turns.drop("beyond_max_context", chat.turns - fitting)
    account.turns.drop("beyond_max_turns", fitting - allowed)
    chat.keep_turns(allowed)
    return ""


def _turns_that_fit(chat: Chat, limit: int | None) -> int:
    if limit is None:
        return chat.turns
    per_turn = (new + out for new, out in zip(chat.new_tokens, chat.output_tokens, strict=True))
    held = accumulate(per_turn, initial=chat.context_tokens)
    next(held)
    return sum(1 for tokens in held if tokens <= limit)


def _sampled(chats: Iterable[Chat], selection: Selection, account: Account) -> Iterator[Chat]:
    """The chats with the smallest lots; memory holds only the sample."""
    wanted = selection.sample or 0
    heap: list[tuple[float, int, Chat]] = []
    found = 0
    for found, chat in enumerate(chats, start=1):
        entry = (-unit_interval(chat.id, selection.seed), found, chat)
        if len(heap) < wanted:
            heapq.heappush(heap, entry)
        else:
            _, _, out = heapq.heappushpop(heap, entry)
            _drop(out, "not_sampled", account)
    if len(heap) < wanted:
        raise WorkloadError(
            f"a sample of {wanted} conversations was asked for and {found} pass the selection; "
            "ask for fewer or loosen the limits"
        )
    for _, _, chat in sorted(heap, key=lambda entry: -entry[0]):
        yield chat


def _drop(chat: Chat, reason: str, account: Account) -> None:
    account.conversations.drop(reason)
    account.turns.drop("in_dropped_conversation", chat.turns)
