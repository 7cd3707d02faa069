"""Reading a source once, keeping its prepared form, and drawing conversations from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import WorkloadError
from ppdbench.core.folders import cache_folder
from ppdbench.workload.account import Account
from ppdbench.workload.chat import Chat, RawChat
from ppdbench.workload.clean import RULES_VERSION, clean, first_of_each_id, join_parts
from ppdbench.workload.content import with_texts, with_token_ids
from ppdbench.workload.prepared import (
    SCHEMA_VERSION,
    Origin,
    PreparedInfo,
    prepared_info,
    read_prepared,
    write_prepared,
)
from ppdbench.workload.select import EVERYTHING, Selection, select
from ppdbench.workload.source import Source, SourceKind, find_source
from ppdbench.workload.think import NO_PAUSE, ThinkTime
from ppdbench.workload.tokens import DEFAULT, Tokenizer, counted, load_tokenizer

ASSUMED_TURNS, ASSUMED_OUTPUT_TOKENS = 4.0, 1000.0
"""For forecasts over data that would have to be read or downloaded first."""


def read_chats(source: Source, account: Account) -> Iterator[Chat]:
    """Cleaned chats without token counts; the account is final when the iterator ends."""
    if source.kind is SourceKind.JSON:
        return clean(join_parts(_raw(source, account), account), account)
    return clean(first_of_each_id(_raw(source, account), account), account)


def _raw(source: Source, account: Account) -> Iterator[RawChat]:
    if source.kind is SourceKind.JSON:
        from ppdbench.workload.read_json import read_json

        return read_json(source.paths[0], account)
    from ppdbench.workload.read_parquet import read_hub, read_shards

    if source.kind is SourceKind.HUB:
        return read_hub(source.hub_name, account)
    return read_shards(source.paths, account)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared file and what it says of itself."""

    path: Path
    info: PreparedInfo


Report = Callable[[int], None]
"""Told the number of conversations that were cleaned and counted so far."""


def _silent(_: int) -> None:
    pass


def prepare(
    name: str,
    tokenizer_source: str = DEFAULT,
    selection: Selection = EVERYTHING,
    report: Report = _silent,
) -> Prepared:
    """The prepared form of SRC: the file itself if it is one, else the kept one, else made now.

    Kept under ``workloads/`` of the cache folder, by the source's files, the tokenizer's digest
    and the version of the cleaning rules. JSON sources are kept whole; Parquet and hub sources,
    which may be far larger, as ``selection`` leaves them. Whoever reads it applies ``selection``
    (again): that changes nothing the second time.
    """
    source = find_source(name)
    if (given := _given_prepared(source, tokenizer_source)) is not None:
        return given
    tokenizer = load_tokenizer(tokenizer_source)
    kept = _kept_selection(source, selection)
    path = _kept_path(source, tokenizer, kept)
    if path.is_file() and (info := prepared_info(path)) is not None:
        return Prepared(path, info)
    return _make(path, source, tokenizer, kept, report)


def is_prepared(name: str, tokenizer_source: str, selection: Selection) -> bool:
    """Whether :func:`prepare` would find it done."""
    source = find_source(name)
    if _given_prepared(source, tokenizer_source) is not None:
        return True
    kept = _kept_selection(source, selection)
    return _kept_path(source, load_tokenizer(tokenizer_source), kept).is_file()


def _kept_selection(source: Source, selection: Selection) -> Selection:
    return EVERYTHING if source.kind is SourceKind.JSON else selection


def prepare_into(
    path: Path,
    name: str,
    tokenizer_source: str,
    selection: Selection,
    report: Report = _silent,
) -> Prepared:
    """Write what ``selection`` leaves of SRC to ``path``, from the kept form where there is one."""
    source = find_source(name)
    _check_out(path, source)
    given = _given_prepared(source, tokenizer_source)
    tokenizer = load_tokenizer(tokenizer_source)
    if given is None:
        kept = _kept_path(source, tokenizer, EVERYTHING)
        if not kept.is_file() or (info := prepared_info(kept)) is None:
            return _make(path, source, tokenizer, selection, report)
        given = Prepared(kept, info)
    account = deepcopy(given.info.account)
    chats = select(read_prepared(given.path, content=True), selection, account)
    origin = replace(given.info.origin, selection=selection.to_json())
    return Prepared(path, write_prepared(path, chats, account, origin, report))


def _check_out(path: Path, source: Source) -> None:
    """The output must be readable as a source later, and must not be the source itself."""
    if path.suffix != ".parquet" or path.is_dir():
        raise WorkloadError(
            f"prepared workload {str(path)!r}: expected the name of a .parquet file, because "
            "that is how it is known when it is read"
        )
    if path.exists() and any(path.samefile(given) for given in source.paths):
        raise WorkloadError(
            f"prepared workload {str(path)!r} would replace its own source; name another file"
        )


def _kept_path(source: Source, tokenizer: Tokenizer, selection: Selection) -> Path:
    parts = [source.fingerprint, tokenizer.digest, RULES_VERSION, SCHEMA_VERSION]
    mark = json.dumps([*parts, selection.to_json()], sort_keys=True)
    key = blake2b(mark.encode(), digest_size=12).hexdigest()
    return cache_folder() / "workloads" / f"{key}.parquet"


def _make(
    path: Path, source: Source, tokenizer: Tokenizer, selection: Selection, report: Report
) -> Prepared:
    account = Account()
    chats = select(read_chats(source, account), selection.without_tokens(), account)
    chats = counted(chats, tokenizer)
    if selection.needs_tokens:
        chats = select(chats, selection, account)
    origin = Origin(
        source.name, tokenizer.name, tokenizer.digest, RULES_VERSION, selection.to_json()
    )
    return Prepared(path, write_prepared(path, chats, account, origin, report))


def _given_prepared(source: Source, tokenizer_source: str) -> Prepared | None:
    """SRC itself when it is a prepared file; another tokenizer than its own is refused."""
    if source.kind is not SourceKind.PARQUET or len(source.paths) != 1:
        return None
    path = source.paths[0]
    info = prepared_info(path)
    if info is None:
        return None
    origin = info.origin
    if tokenizer_source != DEFAULT and (
        load_tokenizer(tokenizer_source).digest != origin.tokenizer_digest
    ):
        raise WorkloadError(
            f"prepared workload {str(path)!r} was counted with {origin.tokenizer}, not with "
            f"{tokenizer_source!r}; prepare it again from its source ({origin.source})"
        )
    return Prepared(path, info)


@dataclass(frozen=True)
class RecordedTurns:
    """A workload of recorded conversations: a source, what is used of it, and the pauses."""

    name: str
    source: str
    selection: Selection = EVERYTHING
    tokenizer: str = DEFAULT
    think: ThinkTime = NO_PAUSE

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.source, self.tokenizer, self.selection)

    @cached_property
    def chats(self) -> list[Chat]:
        """What the selection leaves, without texts."""
        account = Account()
        chats = read_prepared(self.prepared.path, content=False)
        found = list(select(chats, self.selection, account))
        if not found:
            raise WorkloadError(
                f"workload {self.name!r}: no conversation of {self.source!r} passes the selection; "
                "loosen its limits"
            )
        if self.think.kind == "recorded":
            _check_recorded_pauses(self, found)
        return found

    @property
    def is_at_hand(self) -> bool:
        """Whether it is prepared already, so that reading it is quick and needs no network."""
        return is_prepared(self.source, self.tokenizer, self.selection)

    @property
    def mean_turns(self) -> float:
        """Per conversation; a guess until the source has been read once."""
        if not self.is_at_hand:
            return ASSUMED_TURNS
        return sum(chat.turns for chat in self.chats) / len(self.chats)

    @property
    def mean_output_tokens(self) -> float:
        """Per conversation; a guess until the source has been read once."""
        if not self.is_at_hand:
            return ASSUMED_OUTPUT_TOKENS
        return sum(sum(chat.output_tokens) for chat in self.chats) / len(self.chats)

    def conversations(self, n: int, prefix: str, rng: np.random.Generator) -> list[Conversation]:
        """``n`` different ones; the id ends with the chat's own."""
        if n > len(self.chats):
            raise WorkloadError(
                f"workload {self.name!r}: a point needs {n} conversations and the selection has "
                f"{len(self.chats)}; conversations never repeat within a point, so lower the rate "
                "or the duration, or loosen the selection"
            )
        chosen = rng.permutation(len(self.chats))[:n].tolist()
        return [self._conversation(self.chats[i], prefix, rng) for i in chosen]

    def with_content(self, arrivals: Sequence[Arrival], *, as_ids: bool) -> list[Arrival]:
        """The same schedule with its words, as text or as ids of this workload's tokenizer."""
        wanted = {_chat_id(arrival) for arrival in arrivals}
        rows = read_prepared(self.prepared.path, content=True)
        chats = {chat.id: chat for chat in rows if chat.id in wanted}
        texts = with_texts(arrivals, [chats[_chat_id(arrival)] for arrival in arrivals])
        return with_token_ids(texts, load_tokenizer(self.tokenizer)) if as_ids else texts

    def _conversation(self, chat: Chat, prefix: str, rng: np.random.Generator) -> Conversation:
        turns = map(Turn, chat.new_tokens, chat.output_tokens, self._pauses(chat, rng))
        return Conversation(
            f"{prefix}{chat.id}",
            tuple(turns),
            context_tokens=chat.context_tokens,
            context_role=chat.context_role,
        )

    def _pauses(self, chat: Chat, rng: np.random.Generator) -> Iterable[float]:
        if self.think.kind == "recorded":
            return [min(pause or 0.0, self.think.max_s) for pause in chat.think_s]
        return [0.0, *self.think.draw(chat.turns - 1, rng).tolist()]


def _chat_id(arrival: Arrival) -> str:
    """What follows the point's prefix WORKLOAD/RATE/REPEAT/."""
    return arrival.conversation.id.split("/", 3)[3]


def _check_recorded_pauses(spec: RecordedTurns, chats: list[Chat]) -> None:
    if all(pause is None for chat in chats for pause in chat.think_s[1:]):
        raise WorkloadError(
            f"workload {spec.name!r}: think time `recorded` was asked for, but {spec.source!r} "
            "records no message times; use none, fixed, exponential or lognormal"
        )
