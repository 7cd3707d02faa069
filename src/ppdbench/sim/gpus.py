"""GPUs: what their data sheets say. Anybody's can be added to ``gpus.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from ppdbench.core.errors import UsageError
from ppdbench.sim import rules


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense BF16 rate, memory bandwidth and size; ``reserved_bytes`` are neither weights nor KV."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    reserved_bytes: float

    def __post_init__(self) -> None:
        rules.check(f"GPU {self.name}: its", self, _RULES)


_RULES = {
    **dict.fromkeys(("flops_per_s", "bytes_per_s", "memory_bytes"), rules.POSITIVE),
    "reserved_bytes": rules.NOT_NEGATIVE,
}


@cache
def _shipped() -> dict[str, Gpu]:
    text = resources.files("ppdbench.sim").joinpath("gpus.toml").read_text()
    return {name: Gpu(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def known_gpus() -> list[str]:
    return sorted(_shipped())


def gpu(name: str) -> Gpu:
    """The GPU of that name, or the one that the TOML file of that path describes.

    Raises:
        UsageError: unknown, or a file without the fields; the message lists what is known.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name))
    try:
        return _shipped()[name]
    except KeyError:
        known = ", ".join(known_gpus())
        raise UsageError(
            f"unknown GPU {name!r}; known: {known}; or give a TOML file with {_FIELDS}"
        ) from None


_FIELDS = "flops_per_s, bytes_per_s, memory_bytes and reserved_bytes"


def _from_file(path: Path) -> Gpu:
    try:
        return Gpu(name=path.stem, **tomllib.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"GPU file {path}: {error.strerror}; name a file that is there") from error
    except (ValueError, TypeError) as error:  # of TOML, and of UTF-8
        raise UsageError(f"GPU file {path}: {error}; it needs {_FIELDS}") from error
