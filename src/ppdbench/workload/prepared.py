"""The prepared form: cleaned, counted conversations in one Parquet file with its digest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ppdbench.core.errors import NothingUsableError, WorkloadError
from ppdbench.workload.account import Account
from ppdbench.workload.chat import Chat

SCHEMA_VERSION = 1

_KEY = b"ppdbench.workload"
_ROWS_PER_GROUP = 1000
_CONTENT_COLUMNS = ("texts", "replies", "context_text")
_COLUMNS = {
    "id": pa.string(),
    "texts": pa.list_(pa.large_string()),
    "replies": pa.list_(pa.large_string()),
    "new_tokens": pa.list_(pa.int32()),
    "output_tokens": pa.list_(pa.int32()),
    "think_s": pa.list_(pa.float64()),
    "context_text": pa.large_string(),
    "context_role": pa.string(),
    "context_tokens": pa.int32(),
    "language": pa.string(),
    "model": pa.string(),
    "toxic": pa.bool_(),
    "redacted": pa.bool_(),
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the rows come from, by which tokenizer and rules, and what was selected then."""

    source: str
    tokenizer: str
    tokenizer_digest: str
    rules_version: int
    selection: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedInfo:
    """``digest`` covers every row's content and counts, in order, the tokenizer and the rules."""

    origin: Origin
    digest: str
    account: Account

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self.origin),
            "digest": self.digest,
            "account": self.account.to_json(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> PreparedInfo:
        origin = Origin(**{field.name: document[field.name] for field in fields(Origin)})
        return cls(origin, document["digest"], Account.from_json(document["account"]))


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Arrow's errors about a file, as ours."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise WorkloadError(
            f"{str(path)!r} is no readable Parquet file ({said}); fetch or prepare it again"
        ) from error


def write_prepared(
    path: Path,
    chats: Iterable[Chat],
    account: Account,
    origin: Origin,
    report: Callable[[int], None] = lambda _: None,
) -> PreparedInfo:
    """Stream ``chats`` into ``path``; it appears whole or not at all.

    ``account`` is read after the last chat, when it is final. ``report`` is told the number of
    chats so far, a thousand at a time.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        info = _write(temporary, _reported(chats, report), account, origin)
        _sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise WorkloadError(
            f"prepared workload {str(path)!r} cannot be written ({error}); name a file in a "
            "folder that you may write to (the kept form lies in PPD_CACHE)"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return info


def _write(path: Path, chats: Iterable[Chat], account: Account, origin: Origin) -> PreparedInfo:
    facts = [SCHEMA_VERSION, origin.tokenizer_digest, origin.rules_version]
    hasher = blake2b(orjson.dumps(facts), digest_size=16)
    schema = pa.schema(list(_COLUMNS.items()))
    with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
        for batch in _batches(chats):
            _add_to(hasher, batch)
            writer.write_table(_table(batch))
        if account.conversations.kept == 0:
            raise NothingUsableError(_nothing_left(origin, account))
        info = PreparedInfo(origin, hasher.hexdigest(), account)
        writer.add_key_value_metadata({_KEY: json.dumps(info.to_json())})
    return info


def _reported(chats: Iterable[Chat], report: Callable[[int], None]) -> Iterator[Chat]:
    for count, chat in enumerate(chats):
        if count % _ROWS_PER_GROUP == 0:
            report(count)
        yield chat


def _nothing_left(origin: Origin, account: Account) -> str:
    dropped = account.conversations.dropped.most_common()
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped)
    return (
        f"no conversation of {origin.source!r} is left of {account.conversations.read} "
        f"({reasons}); loosen the selection, or see `ppd workload show --no-tokens`"
    )


def _batches(chats: Iterable[Chat]) -> Iterator[list[Chat]]:
    chats = iter(chats)
    while batch := list(islice(chats, _ROWS_PER_GROUP)):
        yield batch


def _table(batch: list[Chat]) -> pa.Table:
    columns = {name: [getattr(chat, name) for chat in batch] for name in _COLUMNS}
    return pa.table(
        {name: pa.array(values, type=_COLUMNS[name]) for name, values in columns.items()}
    )


def _add_to(hasher: blake2b, batch: list[Chat]) -> None:
    for chat in batch:
        hasher.update(orjson.dumps([getattr(chat, name) for name in _COLUMNS]))


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def prepared_info(path: Path) -> PreparedInfo | None:
    """What a prepared file says of itself; ``None`` for any other Parquet file."""
    with parquet_errors(path):
        metadata = pq.read_metadata(path).metadata or {}
    if _KEY not in metadata:
        return None
    document = json.loads(metadata[_KEY])
    if document.get("schema_version") != SCHEMA_VERSION:
        raise WorkloadError(
            f"prepared workload {str(path)!r} has schema version "
            f"{document.get('schema_version')!r}, this tool reads {SCHEMA_VERSION}; "
            "prepare it again with `ppd workload prepare`"
        )
    return PreparedInfo.from_json(document)


def read_prepared(path: Path, *, content: bool) -> Iterator[Chat]:
    """Rows in order; without ``content`` the texts stay on disk and the lists are empty."""
    names = [name for name in _COLUMNS if content or name not in _CONTENT_COLUMNS]
    with parquet_errors(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(_ROWS_PER_GROUP, columns=names):
            yield from _chats(batch.to_pydict(), content=content)


def _chats(columns: dict[str, list[Any]], *, content: bool) -> Iterator[Chat]:
    if not content:
        rows = len(columns["id"])
        columns |= {"texts": [[] for _ in range(rows)], "replies": [[] for _ in range(rows)]}
        columns["context_text"] = [""] * rows
    names = list(_COLUMNS)
    for row in zip(*(columns[name] for name in names), strict=True):
        yield Chat(**dict(zip(names, row, strict=True)))
