"""Options of ``ppd microbench`` that contradict each other are said before anything runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ppdbench.cli.modes import DEVICES_OF, refuse_elsewhere, spelled
from ppdbench.core.errors import UsageError

PROTOCOLS_OF = {
    "batch": ("interference", "paper"),
    "context": ("interference",),
    "new": ("interference",),
    "victim_context": ("interference",),
    "shared_prefix": ("interference",),
    "doses": ("interference",),
    "dose_rate": ("interference",),
    "dose_output": ("interference",),
    "calibrate": ("interference",),
    "tokens": ("handoff",),
    "load": ("handoff",),
}

BACKENDS_OF = {
    "gpu": ("sim",),
    "keep_records": ("sim",),
    "device": ("vllm",),
    "gpus": ("vllm",),
    "vllm": ("vllm",),
    "engine_arg": ("vllm",),
    "node": ("attach",),
    "cluster": ("attach",),
    "time_limit": ("vllm", "attach"),
}

WITH_SOURCE = frozenset({"calibrate", "source", "max_error", "seed", "as_json", "debug"})
"""All that matters when nothing is measured."""


def refuse_contradictions(
    typed: Collection[str], *, backend: str, protocol: str, device: str
) -> None:
    """An option that the chosen experiment would not read is not ignored.

    Raises:
        UsageError: naming the option and where it belongs.
    """
    for name in sorted({"source", "max_error"} & set(typed)):
        if "calibrate" not in typed:
            raise UsageError(f"{spelled(name)} needs --calibrate FILE, where the fit goes")
    if "source" in typed:
        _refuse_beside_source(typed)
        return
    refuse_elsewhere(typed, PROTOCOLS_OF, "protocol", protocol)
    refuse_elsewhere(typed, BACKENDS_OF, "backend", backend)
    refuse_elsewhere(typed, DEVICES_OF, "device", device)


def refuse_unwritable(path: Path) -> None:
    """A calibration takes a file in a folder that is there.

    Raises:
        UsageError: it cannot be written there.
    """
    if path.is_dir():
        raise UsageError(f"--calibrate {path} is a folder; give the file to write")
    if not path.parent.is_dir():
        raise UsageError(f"--calibrate {path}: there is no folder {path.parent}; make it first")


def _refuse_beside_source(typed: Collection[str]) -> None:
    for name in sorted(set(typed) - WITH_SOURCE):
        raise UsageError(
            f"{spelled(name)} says how to measure, and with --from nothing is measured; "
            "leave one of them out"
        )
