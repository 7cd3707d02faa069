"""Models, GPUs and cost sources: what is known, what is refused, and how far a roofline carries."""

from __future__ import annotations

import json
import socket

import pytest

from ppdbench.core.errors import UsageError
from ppdbench.sim.calibrated import read_calibration
from ppdbench.sim.config import SimConfig
from ppdbench.sim.gpus import gpu
from ppdbench.sim.measured import measured_costs
from ppdbench.sim.models import known_models, model_shape
from ppdbench.sim.prepare import capacity_for, costs_for
from ppdbench.sim.roofline import roofline_costs


@pytest.mark.parametrize(
    "alias",
    [
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.1-8b",
        "META-LLAMA/llama-3.1-8b",
    ],
)
def test_a_model_goes_by_its_hub_id_and_its_aliases(alias):
    """All names of one shape give that shape: 8.03 billion weights, 128 KiB of KV per token."""
    shape = model_shape(alias)

    assert shape.weight_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert shape.kv_bytes_per_token == 128 * 1024


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-14B", 14.77),
        ("meta-llama/Llama-3.1-70B", 70.55),
        ("Qwen/Qwen3-30B-A3B", 30.53),
        ("mistralai/Mixtral-8x7B-v0.1", 46.70),
        ("Qwen/Qwen3-0.6B", 0.596),
    ],
)
def test_shipped_shapes_have_the_published_number_of_weights(name, billions):
    """A typing error in a shape would show here."""
    assert model_shape(name).weight_bytes / 2e9 == pytest.approx(billions, rel=2e-3)


def test_a_local_config_is_read(tmp_path):
    """A folder with config.json is a model; head size and KV heads have their usual defaults."""
    config = {
        "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 688, "vocab_size": 4096,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert model_shape(str(tmp_path)).kv_bytes_per_token == 2 * 4 * 2 * 64 * 2


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_damaged_config_or_calibration_is_one_sentence(content, tmp_path):
    """Cut off, of another kind, or nested without end: the file is named, with what to do."""
    path = tmp_path / "config.json"
    path.write_text(content)

    with pytest.raises(UsageError, match=r"config.json .*; copy the model's config again"):
        model_shape(str(tmp_path))
    with pytest.raises(UsageError, match=r"config.json is no calibration file .*; fit it again"):
        read_calibration(path)


def test_the_library_is_asked_without_any_connection(monkeypatch):
    """Shapes come from here; a socket would mean that the cost library went to a hub."""

    def refuse(*_, **__):
        raise AssertionError("something opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    for name in known_models():
        assert measured_costs(model_shape(name), gpu("h100_sxm"), 64).dense_s(1) > 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gpu": "h900"}, "unknown GPU 'h900'; known: .*h100_sxm"),
        ({"model": "nobody/Nothing-1B"}, "unknown model .*; known: .*Qwen/Qwen2.5-14B"),
        ({"max_context_tokens": 10**6}, "takes at most 131072"),
        ({"model": "meta-llama/Llama-3.1-70B"}, "needs 131.. GiB for weights .* larger GPU"),
        ({"connector": "carrier_pigeon"}, "unknown connector .*; known: nixl, p2p_nccl"),
        ({"link": "string"}, "unknown link .*; known: .*nvlink"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_known(changes, what):
    """One sentence: which value, and the list."""
    with pytest.raises(UsageError, match=what):
        capacity_for(SimConfig(**changes))


def test_any_gpu_can_be_described_in_a_file(tmp_path):
    """Four numbers of a data sheet make a GPU; with them roofline costs need no library."""
    path = tmp_path / "mine.toml"
    path.write_text(
        "flops_per_s = 989e12\nbytes_per_s = 3.35e12\n"
        "memory_bytes = 85_899_345_920\nreserved_bytes = 3_758_096_384\n"
    )
    mine = SimConfig(gpu=str(path), costs="roofline")

    assert capacity_for(mine) == capacity_for(SimConfig())
    assert costs_for(mine).dense_s(64) == costs_for(SimConfig(costs="roofline")).dense_s(64)


def test_a_gpu_file_without_its_numbers_is_refused(tmp_path):
    """The message names the fields."""
    path = tmp_path / "mine.toml"
    path.write_text("flops_per_s = 989e12\n")

    with pytest.raises(UsageError, match="it needs flops_per_s, bytes_per_s, memory_bytes"):
        gpu(str(path))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'flops_per_s = "x"', "its flops_per_s is 'x'; expected a number above 0"),
        (b"flops_per_s = 0", "its flops_per_s is 0; expected a number above 0"),
        (b"flops_per_s = -1e12", "expected a number above 0"),
        (b'name = "\xff"', "it needs flops_per_s, bytes_per_s"),
    ],
)
def test_a_gpu_file_of_impossible_numbers_is_refused(line, what, tmp_path):
    """A bandwidth below nothing would be simulated; a text would end in a traceback."""
    path = tmp_path / "mine.toml"
    path.write_bytes(line + b"\nbytes_per_s = 3e12\nmemory_bytes = 80e9\nreserved_bytes = 4e9\n")

    with pytest.raises(UsageError, match=what):
        gpu(str(path))


@pytest.mark.parametrize("broken", [{"num_attention_heads": 0}, {"num_hidden_layers": "x"}])
def test_a_local_config_of_impossible_counts_is_refused(broken, tmp_path):
    """No heads, or a text for a number: one sentence."""
    config = {
        "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": None, "intermediate_size": 688, "vocab_size": 4096,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_shape(str(tmp_path)).kv_heads == 4
    path.write_text(json.dumps(config | broken))

    with pytest.raises(UsageError, match="whole number"):
        model_shape(str(tmp_path))


@pytest.mark.parametrize(("name", "within"), [("h100_sxm", 0.25), ("a100_sxm", 0.30)])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-14B", "meta-llama/Llama-3.1-8B"])
def test_the_roofline_is_near_what_was_measured(name, within, model):
    """Decode steps and prompts of serving size lie within the stated band of the measured time."""
    shape, card = model_shape(model), gpu(name)
    near, truth = roofline_costs(shape, card, 4096), measured_costs(shape, card, 4096)

    for batch, context in ((1, 2048), (64, 2048), (200, 1024)):
        ratio = decode_s(near, batch, context) / decode_s(truth, batch, context)
        assert abs(ratio - 1) < within, (batch, context)
    for new, prefix in ((512, 0), (2048, 0), (4096, 0), (512, 8192)):
        ratio = prompt_s(near, new, prefix) / prompt_s(truth, new, prefix)
        assert abs(ratio - 1) < within, (new, prefix)


def decode_s(tables, batch, context):
    return tables.dense_s(batch) + tables.decode_line(batch, context).at_s


def prompt_s(tables, new, prefix):
    return tables.dense_s(new) + tables.prefill_attention_s(new, prefix)
