"""WildChat-like and ShareGPT-like rows from Parquet shards or the hub, a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ppdbench.core.errors import WorkloadError
from ppdbench.workload.account import Account
from ppdbench.workload.chat import RawChat
from ppdbench.workload.prepared import parquet_errors
from ppdbench.workload.unwrap import raw_chat

_ROWS_PER_BATCH = 512
_BUFFER_BYTES = 1 << 18
"""Without it Arrow holds whole column chunks, and a shard may be one row group."""

_LISTS = ("conversation", "conversations", "messages")
_ROW_COLUMNS = (
    "conversation_hash", "conversation_id", "id", "model", "language", "toxic", "redacted",
)  # fmt: skip
_MESSAGE_FIELDS = ("role", "from", "content", "value", "text", "timestamp")


def read_shards(paths: Iterable[Path], account: Account) -> Iterator[RawChat]:
    """Rows of every shard in order. Only the columns that are used leave the disk."""
    for path in paths:
        with parquet_errors(path), _opened(path) as file:
            columns = _columns(path, file.schema_arrow)
            for batch in file.iter_batches(_ROWS_PER_BATCH, columns=columns):
                yield from _booked(batch.to_pylist(), account)
    if account.conversations.read == 0:
        raise WorkloadError(f"dataset {str(path)!r} holds no row; expected one per conversation")


def _opened(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def _columns(path: Path, schema: pa.Schema) -> list[str]:
    listed = next((name for name in _LISTS if name in schema.names), None)
    if listed is None and "texts" in schema.names:
        raise WorkloadError(
            f"dataset {str(path)!r} is a prepared file, whose tokens are counted already; name it "
            "alone, and leave --no-tokens out"
        )
    if listed is None:
        raise WorkloadError(
            f"dataset {str(path)!r} has no column `conversation`; it has "
            f"{', '.join(schema.names) or 'none'}; expected WildChat's or ShareGPT's schema"
        )
    wanted = [name for name in _ROW_COLUMNS if name in schema.names]
    element = getattr(schema.field(listed).type, "value_type", None)
    if element is None or not pa.types.is_struct(element):
        return [*wanted, listed]
    inner = schema.field(listed).type.value_field.name
    fields = [field.name for field in element if field.name in _MESSAGE_FIELDS]
    return [*wanted, *(f"{listed}.list.{inner}.{name}" for name in fields)]


def _booked(rows: Iterable[Mapping[str, Any]], account: Account) -> Iterator[RawChat]:
    for row in rows:
        raw = raw_chat(row, account.conversations.read)
        account.conversations.read += 1
        account.messages.read += len(raw.messages)
        yield raw


def read_hub(name: str, account: Account) -> Iterator[RawChat]:
    """Stream the ``train`` split of a hub dataset; the only reader that uses the network."""
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train", streaming=True)
        yield from _booked(rows, account)
    except Exception as error:  # the library raises errors of many foreign libraries
        said = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise WorkloadError(
            f"dataset {name!r} could not be read from the hub ({said}); check the name and the "
            "network, or download its Parquet files and name the folder"
        ) from error
