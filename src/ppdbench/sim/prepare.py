"""From a configuration to the tables and the memory of one node, once per process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ppdbench.core.errors import UsageError
from ppdbench.sim.calibrated import read_calibration
from ppdbench.sim.cluster import Capacity
from ppdbench.sim.config import SimConfig
from ppdbench.sim.costs import CostTables
from ppdbench.sim.gpus import gpu
from ppdbench.sim.measured import measured_costs
from ppdbench.sim.models import model_shape
from ppdbench.sim.roofline import roofline_costs

BUILT_IN = ("measured", "roofline")


@lru_cache(maxsize=8)
def costs_for(config: SimConfig) -> CostTables:
    """Cost tables of the configuration's source.

    Raises:
        UsageError: unknown GPU, model or source.
    """
    if config.costs not in BUILT_IN:
        return read_calibration(Path(config.costs)).tables()
    tables = _source(config.costs, config.model, config.gpu, config.max_batched_tokens)
    return tables.stretched(config.compute_factor)


@lru_cache(maxsize=8)
def _source(costs: str, model: str, card: str, max_tokens: int) -> CostTables:
    tabulate = roofline_costs if costs == "roofline" else measured_costs
    return tabulate(model_shape(model), gpu(card), max_tokens)


def capacity_for(config: SimConfig) -> Capacity:
    """KV blocks that fit beside the weights, as vLLM reckons them.

    Raises:
        UsageError: unknown GPU or model, a context beyond the model's, a model that does not fit.
    """
    if config.costs not in BUILT_IN:
        fitted = read_calibration(Path(config.costs))
        blocks = fitted.kv_tokens // fitted.block_tokens
        return Capacity(blocks, fitted.kv_bytes_per_token, fitted.context_tokens)
    shape, card = model_shape(config.model), gpu(config.gpu)
    context = config.max_context_tokens or shape.context_tokens
    if context > shape.context_tokens:
        raise UsageError(
            f"context of {context} tokens: {shape.name} takes at most {shape.context_tokens}"
        )
    usable = int(card.memory_bytes * config.gpu_memory_utilization)
    room = usable - shape.weight_bytes - card.reserved_bytes
    blocks = int(room // (shape.kv_bytes_per_token * config.block_tokens))
    if blocks < 1:
        raise UsageError(
            f"{shape.name} needs {shape.weight_bytes / 2**30:.1f} GiB for weights alone and "
            f"{card.name} offers {usable / 2**30:.1f} GiB at gpu_memory_utilization "
            f"{config.gpu_memory_utilization:g}: take a smaller model or a larger GPU"
        )
    return Capacity(blocks, shape.kv_bytes_per_token, context)


def cost_source(config: SimConfig) -> str:
    """Name and version of where the costs come from, without loading them."""
    from importlib.metadata import version

    if config.costs not in BUILT_IN:
        return read_calibration(Path(config.costs)).tables().source
    if config.costs == "roofline":
        return f"roofline of {config.gpu}"
    return f"{config.costs}: aiconfigurator-core {version('aiconfigurator-core')}"
