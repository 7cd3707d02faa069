"""What a sweep knows of a cluster before it starts one."""

from __future__ import annotations

import pytest

from ppdbench.cluster.launch import LaunchOptions
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.errors import UsageError
from ppdbench.experiments.clusters import block_tokens


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ((), 16),
        (("--block-size", "32"), 32),
        (("--block-size=32",), 32),
        (("--block_size=32",), 32),
        (("--block-size=32", "--block-size", "64"), 64),
    ],
)
def test_the_block_size_is_read_however_it_is_written(arguments, tokens):
    """Runs with different block sizes never pool, so the manifest must have the real one."""
    options = LaunchOptions(model="m", device=Device.CUDA, engine_args=arguments)

    assert block_tokens(options) == tokens


@pytest.mark.parametrize("arguments", [("--block-size=x",), ("--block-size",)])
def test_a_block_size_that_is_no_number_is_refused(arguments):
    """Before any node starts."""
    with pytest.raises(UsageError, match="no number of tokens"):
        block_tokens(LaunchOptions(model="m", engine_args=arguments))
