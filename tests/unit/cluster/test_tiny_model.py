"""The model that is made here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ppdbench.cluster.tiny_model import VOCABULARY, tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tiny_model()


def test_its_weights_are_a_whole_safetensors_file(folder):
    """Header, then tensors without gaps to the end of the file, each as long as its shape says."""
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    at = 0
    for tensor in header.values():
        assert tensor["dtype"] == "BF16"
        assert tensor["data_offsets"] == [at, at + 2 * int(np.prod(tensor["shape"]))]
        at = tensor["data_offsets"][1]
    assert 8 + length + at == len(raw)
    assert header["lm_head.weight"]["shape"] == [VOCABULARY, 256]
    assert header["model.layers.3.self_attn.k_proj.weight"]["shape"] == [128, 256]


def test_its_weights_are_of_a_trained_models_size(folder):
    """With vLLM's dummy ones, a thousandth, no answer depends on what was said."""
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])["lm_head.weight"]["data_offsets"]
    upper = np.frombuffer(raw[8 + length + begin : 8 + length + end], "<u2").astype(np.uint32)

    values = (upper << 16).view(np.float32)

    assert np.std(values) == pytest.approx(1 / 16, rel=0.02)
