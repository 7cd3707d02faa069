"""ShareGPT-like JSON and JSONL, plain or gzip, streamed; a cut-off file yields what is whole."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from ppdbench.core.errors import WorkloadError
from ppdbench.workload.account import Account
from ppdbench.workload.chat import RawChat
from ppdbench.workload.nesting import MOST_LEVELS, TooDeepError, is_deep, shallow
from ppdbench.workload.unwrap import raw_chat

_BUFFER_BYTES = 1 << 20


def read_json(path: Path, account: Account) -> Iterator[RawChat]:
    """Every whole conversation of the file, in order, each booked as read.

    A file that ends in the middle of a value sets ``account.truncated_at_byte`` to its
    (uncompressed) length. Anything else that is wrong is an error.
    """
    with _opened(path) as stream:
        try:
            entries = _entries(path, stream, account)
            for index, entry in enumerate(entries):
                account.conversations.read += 1
                raw = raw_chat(entry, index)
                account.messages.read += len(raw.messages)
                yield raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise WorkloadError(
                f"dataset {str(path)!r}: the gzip data is damaged or cut off ({error}); "
                "copy the file again"
            ) from error
        except TooDeepError as error:
            raise WorkloadError(
                f"dataset {str(path)!r}: conversation {account.conversations.read + 1} is {error}, "
                "which no export is; repair or fetch the file again"
            ) from error
    if account.conversations.read == 0:
        raise WorkloadError(
            f"dataset {str(path)!r} holds no whole conversation; expected a JSON list of "
            "conversations, or one per line"
        )


def _opened(path: Path) -> IO[bytes]:
    try:
        if path.name.endswith(".gz"):
            return gzip.open(path, "rb")  # type: ignore[return-value]
        return path.open("rb")
    except OSError as error:
        raise WorkloadError(
            f"dataset {str(path)!r} cannot be opened ({error.strerror}); check the path"
        ) from error


def _entries(path: Path, stream: IO[bytes], account: Account) -> Iterator[Any]:
    first = _first_byte(stream)
    if first == b"":
        raise WorkloadError(
            f"dataset {str(path)!r} is empty; expected a JSON list of conversations"
        )
    if first == b"[":
        return _from_list(path, stream, account)
    if first == b"{":
        return _from_lines(path, stream, account)
    raise WorkloadError(
        f"dataset {str(path)!r} begins with {first!r}; expected a JSON list ('[') or JSON lines "
        "('{')"
    )


def _first_byte(stream: IO[bytes]) -> bytes:
    """The first byte that is no white space or byte-order mark; leaves the stream on it."""
    head = stream.read(1024)
    stripped = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    stream.seek(len(head) - len(stripped))
    return stripped[:1]


def _from_list(path: Path, stream: IO[bytes], account: Account) -> Iterator[Any]:
    import ijson

    events = ijson.basic_parse(stream, buf_size=_BUFFER_BYTES, use_float=True)
    try:
        yield from ijson.items(ijson.parse(shallow(events)), "item")
    except ijson.JSONError as error:
        said = " ".join(str(error).split())
        if "EOF" in said or "premature" in said:
            account.truncated_at_byte = stream.tell()
            return
        raise WorkloadError(
            f"dataset {str(path)!r} is not JSON after {account.conversations.read} conversations "
            f"({said[:120]}); repair or fetch the file again"
        ) from error


def _from_lines(path: Path, stream: IO[bytes], account: Account) -> Iterator[Any]:
    """One value per line. Only the last line may be broken, and only if no newline ends it."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if "depth limit" in str(error):
                raise TooDeepError from error
            if not line.endswith(b"\n") and account.conversations.read:
                account.truncated_at_byte = stream.tell()
                return
            raise WorkloadError(
                f"dataset {str(path)!r}, line {number} is not JSON in UTF-8 ({error}); "
                "expected one conversation per line"
            ) from error
        # Counting is quick and nearly always enough.
        if line.count(b"[") + line.count(b"{") > MOST_LEVELS and is_deep(entry):
            raise TooDeepError
        yield entry
