"""Model shapes: what costs and memory depend on. Nothing here ever asks a hub."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ppdbench.core.errors import UsageError
from ppdbench.sim import rules


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer in BF16. Counts as in its ``config.json``.

    ``experts`` is 0 for a dense model; otherwise ``active_experts`` of them see each token and
    ``ffn`` is the width of one expert.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    context_tokens: int
    tied_embeddings: bool = False
    experts: int = 0
    active_experts: int = 0
    bytes_per_value: int = 2

    def __post_init__(self) -> None:
        rules.check(f"{self.name}: its", self, _RULES)

    def as_config(self) -> dict[str, Any]:
        """The shape as a ``config.json`` that vLLM's and the cost library's readers know."""
        mixture = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.active_experts,
            "moe_intermediate_size": self.ffn,
        }
        return {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "LlamaForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context_tokens,
            "tie_word_embeddings": self.tied_embeddings,
            "torch_dtype": "bfloat16",
            **(mixture if self.experts else {}),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_value

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's projections."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    def ffn_weights(self, experts: int) -> int:
        """Weights of one layer's feed-forward part with ``experts`` of them (1 when dense)."""
        return 3 * self.hidden * self.ffn * max(1, experts)

    @property
    def weight_bytes(self) -> int:
        layer = self.attention_weights + self.ffn_weights(self.experts)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.bytes_per_value * (self.layers * layer + embeddings)


_AT_LEAST_ONE = (
    "layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocabulary", "context_tokens",
)  # fmt: skip
_RULES = {
    **dict.fromkeys(_AT_LEAST_ONE, rules.COUNT),
    **dict.fromkeys(("experts", "active_experts"), rules.COUNT_FROM_0),
}


@cache
def _shipped() -> dict[str, ModelShape]:
    """By every name they go by, in lower case."""
    text = resources.files("ppdbench.sim").joinpath("models.toml").read_text()
    named: dict[str, ModelShape] = {}
    for entry in tomllib.loads(text)["model"]:
        aliases = entry.pop("aliases", [])
        shape = ModelShape(**entry)
        named.update((name.lower(), shape) for name in (shape.name, *aliases))
    return named


def known_models() -> list[str]:
    return sorted({shape.name for shape in _shipped().values()})


def model_shape(name: str) -> ModelShape:
    """The shape of a hub id, of its alias, or of a local folder that holds a ``config.json``.

    Raises:
        UsageError: neither; the message lists what is known.
    """
    shape = _shipped().get(name.lower())
    if shape is not None:
        return shape
    config = Path(name) / "config.json"
    if config.is_file():
        return _from_config(name, _read(config))
    raise UsageError(
        f"unknown model {name!r}; known: {', '.join(known_models())}; "
        "or give a folder that holds the model's config.json"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); copy the model's config again") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object; copy the model's config again")
    return document


def _from_config(name: str, config: dict[str, Any]) -> ModelShape:
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            experts=config.get("num_experts") or config.get("num_local_experts") or 0,
            active_experts=config.get("num_experts_per_tok") or 0,
        )
    except KeyError as missing:
        raise UsageError(
            f"{name}/config.json has no field {missing}; a decoder-only transformer's is needed"
        ) from None
    except (TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"{name}/config.json: {error}; its counts must be whole numbers from 1 on"
        ) from error
