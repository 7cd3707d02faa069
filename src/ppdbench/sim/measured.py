"""Costs measured on real GPUs, from ``aiconfigurator-core``'s operator tables."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ppdbench.core.errors import UsageError
from ppdbench.sim.costs import CostTables
from ppdbench.sim.gpus import Gpu
from ppdbench.sim.models import ModelShape

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, 1024)
CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNKS = (0, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PREFIXES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MILLISECOND = 1e-3


def measured_costs(shape: ModelShape, card: Gpu, max_tokens: int) -> CostTables:
    """Tabulate the library's predictions for one GPU without tensor parallelism.

    Raises:
        UsageError: the library is not installed here, or does not know the GPU or the model.
    """
    handle = _compile(shape, card)
    sizes = [*range(1, 64), *range(64, 1024, 16), *range(1024, max_tokens + 1, 128)]
    dense = np.interp(range(max_tokens + 1), sizes, [_dense_s(handle, n) for n in sizes])
    return CostTables(
        dense_s=dense.tolist(),
        batches=BATCHES,
        contexts=CONTEXTS,
        decode_attention_s=[[_decode_s(handle, b, c) for c in CONTEXTS] for b in BATCHES],
        chunks=CHUNKS,
        prefixes=PREFIXES,
        prefill_attention_s=[[_prefill_s(handle, n, p) for p in PREFIXES] for n in CHUNKS],
        source=f"aiconfigurator-core {_version()}",
    )


def _dense_s(handle: Any, tokens: int) -> float:  # noqa: ANN401
    return float(handle.mixed_step_breakdown(tokens, 0, tokens, 2, 0)[1]) * MILLISECOND


def _decode_s(handle: Any, batch: int, context: int) -> float:  # noqa: ANN401
    ops = handle.decode_step_per_op(batch, max(1, context), 2)
    attention_ms = sum(ms for name, ms, *_ in ops if name == "generation_attention")
    return float(attention_ms) * MILLISECOND


def _prefill_s(handle: Any, new: int, prefix: int) -> float:  # noqa: ANN401
    """The library gives attention only inside a whole prefill: take the dense part away."""
    new = max(1, new)
    whole = float(handle.predict_prefill_latency(1, new + prefix, prefix)) * MILLISECOND
    return max(0.0, whole - _dense_s(handle, new))


def _compile(shape: ModelShape, card: Gpu) -> Any:  # noqa: ANN401
    """From a folder with our own ``config.json``, so that the library has nothing to fetch."""
    try:
        with _silence(), tempfile.TemporaryDirectory() as folder:
            from aiconfigurator_core.sdk.engine import EngineHandle

            Path(folder, "config.json").write_text(json.dumps(shape.as_config()))
            return EngineHandle.compile(folder, card.name, "vllm")
    except ImportError:
        raise UsageError(
            "measured costs need aiconfigurator-core, which exists for Linux on x86-64 only; "
            "use roofline costs here"
        ) from None
    except Exception as error:
        raise UsageError(
            f"no measured costs for {shape.name} on {card.name} ({error}); use roofline costs"
        ) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The library writes notes on other model families to both streams, some of them from Rust."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with Path(os.devnull).open("w") as null, contextlib.ExitStack() as stack:
        for stream in (1, 2):
            saved = os.dup(stream)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, stream)
            os.dup2(null.fileno(), stream)
        try:
            yield
        finally:
            logging.disable(level)


def _version() -> str:
    from importlib.metadata import version

    return version("aiconfigurator-core")
