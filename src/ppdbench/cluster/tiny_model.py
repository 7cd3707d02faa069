"""A Llama small enough for one core, made on first use and never downloaded.

Speed depends on shapes, not on weights, so the weights are vLLM's seeded dummy ones
(``--load-format dummy``) and equal on every node. Its text is noise: send token ids where token
identity matters.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppdbench.cluster.folders import cache_folder

NAME = "tiny-llama"
VOCABULARY = 4096
MAX_CONTEXT_TOKENS = 16384
_RECIPE = "1"

_BEGIN, _END = "<|begin|>", "<|end|>"

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Turn k+1's prompt extends turn k's, so a prefix cache can hold it."""

_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _BEGIN,
    "eos_token": _END,
    "model_max_length": MAX_CONTEXT_TOKENS,
    "chat_template": _CHAT_TEMPLATE,
}


def tiny_model() -> Path:
    """The model's folder; made when it is not there yet, whole or not at all."""
    folder = cache_folder() / "models" / f"{NAME}-{_RECIPE}"
    if not folder.exists():
        _make(folder)
    return folder


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        _write(draft)
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG, indent=1))
    _train_tokenizer(folder / "tokenizer.json")


def _train_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_BEGIN, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_local_text(), trainer)
    tokenizer.save(str(path))


def _local_text() -> Iterator[str]:
    """English prose that every Python carries: the language reference behind ``help()``."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
