"""GPUs: what their data sheets say. Anybody's can be added to ``gpus.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ppdbench.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense BF16 rate, memory bandwidth and size; ``reserved_bytes`` are neither weights nor KV."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    reserved_bytes: int


@cache
def _shipped() -> dict[str, Gpu]:
    text = resources.files("ppdbench.sim").joinpath("gpus.toml").read_text()
    return {name: Gpu(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def known_gpus() -> list[str]:
    return sorted(_shipped())


def gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        UsageError: unknown; the message lists what is known.
    """
    try:
        return _shipped()[name]
    except KeyError:
        known = ", ".join(known_gpus())
        raise UsageError(f"unknown GPU {name!r}; known: {known}") from None
