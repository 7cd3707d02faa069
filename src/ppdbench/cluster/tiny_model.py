"""A Llama small enough for one core, made on first use and never downloaded.

Its random weights are of a trained model's size, so that each prompt has an answer of its own and
wrong KV shows in the tokens. vLLM's dummy weights are so small that every prompt gets the same
answer. The text is noise: send token ids where token identity matters.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdbench.cluster.folders import cache_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "tiny-llama"
VOCABULARY = 4096
MAX_CONTEXT_TOKENS = 16384
_RECIPE = "2"
_SEED = 2601

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
    _write_weights(folder / "model.safetensors")


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


def _write_weights(path: Path) -> None:
    """In the safetensors format: the header's length, the header, then all numbers as bfloat16."""
    weights = {name: _as_bfloat16(values) for name, values in _random_weights()}
    header: dict[str, Any] = {}
    at = 0
    for name, raw in weights.items():
        header[name] = {"dtype": "BF16", "shape": raw.shape, "data_offsets": [at, at + raw.nbytes]}
        at += raw.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(raw.tobytes() for raw in weights.values())


def _as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each number, which is what bfloat16 keeps."""
    import numpy as np

    return (values.view(np.uint32) >> 16).astype("<u2")


def _random_weights() -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each layer adds about as much as it gets; queries and keys pick out a few tokens."""
    import numpy as np

    picks = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return picks.standard_normal((rows, columns), np.float32) * np.float32(gain / columns**0.5)

    wide, inner = _CONFIG["hidden_size"], _CONFIG["intermediate_size"]
    narrow = wide * _CONFIG["num_key_value_heads"] // _CONFIG["num_attention_heads"]
    ones = np.ones(wide, np.float32)
    yield "model.embed_tokens.weight", matrix(VOCABULARY, wide, wide**0.5)
    for layer in range(_CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", ones
        yield f"{at}.self_attn.q_proj.weight", matrix(wide, wide, 1.5)
        yield f"{at}.self_attn.k_proj.weight", matrix(narrow, wide, 1.5)
        yield f"{at}.self_attn.v_proj.weight", matrix(narrow, wide, 1.5)
        yield f"{at}.self_attn.o_proj.weight", matrix(wide, wide, 1.5)
        yield f"{at}.post_attention_layernorm.weight", ones
        yield f"{at}.mlp.gate_proj.weight", matrix(inner, wide)
        yield f"{at}.mlp.up_proj.weight", matrix(inner, wide)
        yield f"{at}.mlp.down_proj.weight", matrix(wide, inner)
    yield "model.norm.weight", ones
    yield "lm_head.weight", matrix(VOCABULARY, wide)
