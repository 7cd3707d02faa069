"""From messages as people left them to turns that extend one another (docs/workloads.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from ppdbench.workload.account import Account, Ledger
from ppdbench.workload.chat import Chat, Message, RawChat
from ppdbench.workload.seen import SeenIds

RULES_VERSION = 1
"""Part of the cache key and of every digest: raise it when a rule below changes its outcome."""

ROLES = {
    "human": "user", "user": "user",
    "tool": "tool",
    "system": "system",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant",
}  # fmt: skip

_PART = re.compile(r"(?P<chat>.+)_(?P<number>[0-9]+)")
_JOINT = "\n\n"


def join_parts(raws: Iterable[RawChat], account: Account) -> Iterator[RawChat]:
    """Drop repeated ids, then join ``id_0``, ``id_1``, … in order of their number.

    Holds everything in memory: parts may lie anywhere in the file. The joined chat is named after
    its first part and stands where that part's chat was first met.
    """
    chats: dict[str, list[tuple[int, RawChat]]] = {}
    for raw in first_of_each_id(raws, account):
        name, number = _chat_and_number(raw.id)
        chats.setdefault(name, []).append((number, raw))
    for parts in chats.values():
        yield _joined([raw for _, raw in sorted(parts, key=lambda part: part[0])], account)


def first_of_each_id(raws: Iterable[RawChat], account: Account) -> Iterator[RawChat]:
    """Drop repeated ids in one pass."""
    seen = SeenIds()
    for raw in raws:
        if seen.add(raw.id):
            yield raw
        else:
            _drop(raw, "duplicate_id", account)


def _chat_and_number(chat_id: str) -> tuple[str, int]:
    match = _PART.fullmatch(chat_id)
    return (chat_id, 0) if match is None else (match["chat"], int(match["number"]))


def _joined(parts: list[RawChat], account: Account) -> RawChat:
    """Unreadable and empty parts are dropped for what they are; the rest become one."""
    good = [part for part in parts if part.messages]
    whole = good[0] if good else parts[0]
    for part in parts:
        if part is whole:
            continue
        if part.messages:
            whole.messages.extend(part.messages)
            account.conversations.drop("merged")
        else:
            _drop(part, part.problem or "empty", account)
    return whole


def _drop(raw: RawChat, reason: str, account: Account) -> None:
    account.conversations.drop(reason)
    account.messages.drop("in_dropped_conversation", len(raw.messages))


def clean(raws: Iterable[RawChat], account: Account) -> Iterator[Chat]:
    """Apply the rules to each conversation; one without a turn left is dropped with its reason."""
    for raw in raws:
        if not raw.messages:
            _drop(raw, raw.problem or "empty", account)
            continue
        chat = _clean_one(raw, account.messages)
        if chat is None:
            account.conversations.drop("no_turn")
            continue
        account.turns.read += chat.turns
        yield chat


@dataclass(slots=True)
class _Exchange:
    """A run of user messages and the run of replies to it."""

    asked: list[Message] = field(default_factory=list)
    answered: list[Message] = field(default_factory=list)


def _clean_one(raw: RawChat, ledger: Ledger) -> Chat | None:
    messages = _known_roles(raw.messages, ledger)
    start = next(
        (i for i, message in enumerate(messages) if ROLES[message.role] in ("user", "tool")),
        len(messages),
    )
    exchanges = _exchanges(messages[start:], ledger)
    whole = [exchange for exchange in exchanges if _is_whole(exchange, ledger)]
    lead = [message for message in messages[:start] if message.text.strip()]
    ledger.drop("blank", start - len(lead))
    if not whole:
        ledger.drop("in_dropped_conversation", len(lead))
        return None
    return _chat(raw, lead, whole)


def _known_roles(messages: list[Message], ledger: Ledger) -> list[Message]:
    known = [message for message in messages if message.role in ROLES]
    ledger.drop("unknown_role", len(messages) - len(known))
    return known


def _exchanges(messages: list[Message], ledger: Ledger) -> list[_Exchange]:
    exchanges: list[_Exchange] = []
    for message in messages:
        side = ROLES[message.role]
        if side == "system":
            ledger.drop("late_system")
        elif side == "assistant":
            exchanges[-1].answered.append(message)
        else:
            if not exchanges or exchanges[-1].answered:
                exchanges.append(_Exchange())
            exchanges[-1].asked.append(message)
    return exchanges


def _is_whole(exchange: _Exchange, ledger: Ledger) -> bool:
    """Both sides say something; the messages left out are booked."""
    asked = sum(1 for message in exchange.asked if message.text.strip())
    answered = sum(1 for message in exchange.answered if message.text.strip())
    ledger.drop("blank", len(exchange.asked) + len(exchange.answered) - asked - answered)
    if asked and answered:
        return True
    ledger.drop("pair_of_blank" if exchange.answered else "unanswered", asked + answered)
    return False


def _chat(raw: RawChat, lead: list[Message], exchanges: list[_Exchange]) -> Chat:
    turns = len(exchanges)
    only_replies = bool(lead) and all(ROLES[message.role] == "assistant" for message in lead)
    return Chat(
        id=raw.id,
        texts=[_said(exchange.asked) for exchange in exchanges],
        replies=[_said(exchange.answered) for exchange in exchanges],
        new_tokens=[0] * turns,
        output_tokens=[0] * turns,
        think_s=_pauses(exchanges),
        context_text=_said(lead),
        context_role="assistant" if only_replies else "system",
        language=raw.language,
        model=raw.model,
        toxic=raw.toxic,
        redacted=raw.redacted,
    )


def _said(messages: list[Message]) -> str:
    return _JOINT.join(message.text for message in messages if message.text.strip())


def _pauses(exchanges: list[_Exchange]) -> list[float | None]:
    """Seconds from a reply to the next request.

    WildChat stamps only replies in most rows; then it is reply to reply, an upper bound that
    holds the next generation.
    """
    pauses: list[float | None] = [0.0]
    for before, after in pairwise(exchanges):
        ended = _last_time(before.answered)
        began = _last_time(after.asked)
        began = _last_time(after.answered) if began is None else began
        known = ended is not None and began is not None
        pauses.append(max(0.0, began - ended) if known else None)  # type: ignore[operator]
    return pauses


def _last_time(messages: list[Message]) -> float | None:
    times = [message.at_s for message in messages if message.at_s is not None]
    return times[-1] if times else None
