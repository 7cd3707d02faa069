"""Why a node died, read from its log: the likely cause and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Cause(NamedTuple):
    """``signs`` are patterns, in any case, of which one stands in the log."""

    signs: tuple[str, ...]
    cause: str
    change: str


CAUSES = (
    Cause(
        ("address already in use", "errno 98"),
        "a port was taken by another program in the meantime",
        "run it again: ports are chosen anew",
    ),
    Cause(
        ("unrecognized arguments", "invalid choice", "error: argument"),
        "vLLM does not know an argument",
        "check --engine-arg against this vLLM's --help",
    ),
    Cause(
        ("user-specified max_model_len",),
        "--max-model-len exceeds what the model can",
        "use a smaller --max-model-len",
    ),
    Cause(
        ("larger than the available kv cache memory", "larger than the maximum number of tokens"),
        "the KV cache does not hold one request of the model's full length",
        "use a smaller --max-model-len or a larger --kv-cache-gib",
    ),
    Cause(
        (
            "out of memory",
            "cannot allocate memory",
            "no available memory for the cache blocks",
            "free memory on device",
            "not enough memory",
            "available memory .* is less",
            "outofmemory",
        ),
        "too little memory for the model and its KV cache",
        "use fewer nodes, a smaller --kv-cache-gib (CPU), a smaller --max-model-len, or "
        "--engine-arg=--gpu-memory-utilization=…",
    ),
    Cause(
        ("gated repo", "401 client error", "access to model"),
        "the model asks for a login",
        "log in to the model hub, or give a local folder with --model",
    ),
    Cause(
        (
            "repository not found",
            "is not a local folder",
            "can't load the configuration",
            "invalid repository id",
            "hfvalidationerror",
            "localentrynotfound",
            "offlinemodeisenabled",
            "couldn't connect to",
            r"config\.json",
        ),
        "the model is not there or not a model",
        "check --model",
    ),
    Cause(
        ("no module named 'nixl", "nixl is not available", "failed to import nixl"),
        "NIXL is not installed with this vLLM",
        "run scripts/engine, or pip install nixl there",
    ),
    Cause(
        ("no cuda gpus are available", "found no nvidia driver", "failed to infer device type"),
        "vLLM sees no GPU",
        "use --device cpu, or another --gpus",
    ),
    Cause(
        ("no module named", "importerror"),
        "the engine's environment is incomplete",
        "run scripts/engine again, or give another --vllm",
    ),
)
"""The most telling first."""


def why_it_died(name: str, exit_code: int | None, log: Path, tail_lines: int = 4) -> str:
    """A sentence from a dead node's log: how it ended, the likely cause, what to change."""
    text = log.read_text(errors="replace") if log.exists() else ""
    cause, change = likely_cause(text, exit_code)
    tail = " | ".join(line.strip() for line in text.strip().splitlines()[-tail_lines:]) or "nothing"
    return (
        f"node {name} ended with {_ending(exit_code)}: {cause}; "
        f"{change}. Last lines of {log}: {tail[-600:]}"
    )


def likely_cause(log: str, exit_code: int | None) -> tuple[str, str]:
    """Cause and remedy read from a log; for an unknown one the log itself is the advice."""
    for signs, cause, change in CAUSES:
        if any(re.search(sign, log, re.IGNORECASE) for sign in signs):
            return cause, change
    if exit_code == -9:
        return (
            "it was killed, most likely for memory",
            "use fewer nodes or a smaller --kv-cache-gib",
        )
    if not log.strip():
        return "it printed nothing", "check that --vllm is the python of an environment with vLLM"
    return "the cause is not one we know", "read its log"


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit code"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
