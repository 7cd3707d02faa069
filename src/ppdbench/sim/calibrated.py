"""Costs that ``ppd microbench --calibrate`` fitted on one real engine, in a file of their own.

A step of d decoding sequences and prompt chunks of new tokens after some prefix takes
``step_s + sequence_s·d + decode_token_s·Σ context + Σ (token_s·new + pair_s·new·(prefix + new/2)
+ prefix_s·prefix)``. Every coefficient is a time and none is negative.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ppdbench.core.errors import UsageError
from ppdbench.core.files import write_whole
from ppdbench.sim import rules
from ppdbench.sim.config import Connector, Overheads, SimConfig
from ppdbench.sim.costs import CostTables

SCHEMA_VERSION = 1
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 128, 512, 2048, 8192, 32768, 131072)
CHUNKS = (0, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PREFIXES = (0, 128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The coefficients; see the module. ``request_s`` stands before each request."""

    step_s: float
    sequence_s: float
    token_s: float
    decode_token_s: float
    pair_s: float
    prefix_s: float
    request_s: float

    def __post_init__(self) -> None:
        rules.check("steps", self, {f.name: rules.NOT_NEGATIVE for f in fields(self)})

    def chunk_s(self, new: int, prefix: int) -> float:
        """What a prompt's chunk adds to its step."""
        return (
            self.token_s * new
            + self.pair_s * new * (prefix + new / 2)
            + (self.prefix_s * prefix if new else 0.0)
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted, on what, and how well. ``fit`` is for people and for the bound.

    ``hop`` is the measured way through P→D, D's step for the last prompt token included; ``None``
    where no hand-off was measured.
    """

    model: str
    engine: str
    engine_version: str | None
    block_tokens: int
    kv_tokens: int
    kv_bytes_per_token: int
    context_tokens: int
    max_batched_tokens: int
    steps: StepCosts
    fit: dict[str, Any]
    hop: dict[str, float] | None = None

    def __post_init__(self) -> None:
        rules.check("calibration", self, _RULES)

    def config(self, path: Path) -> SimConfig:
        """A simulator configuration that uses the file at ``path``."""
        return SimConfig(
            model=self.model,
            gpu="calibrated",
            costs=str(path),
            connector="nixl",
            connector_profile=self._profile(),
            link="free",
            overheads=self.overheads(),
            max_batched_tokens=self.max_batched_tokens,
            block_tokens=self.block_tokens,
            max_context_tokens=self.context_tokens,
        )

    def overheads(self) -> Overheads:
        """A sequence's own token is dense work too, so only the rest of it is host time."""
        steps = self.steps
        rest_s = max(0.0, steps.sequence_s - steps.token_s)
        return Overheads(steps.step_s, rest_s, None, steps.request_s)

    def tables(self) -> CostTables:
        """As the simulator reads costs from any source."""
        steps = self.steps
        beyond = {new: steps.chunk_s(new, 0) - steps.token_s * new for new in CHUNKS}
        return CostTables(
            dense_s=[steps.token_s * n for n in range(self.max_batched_tokens + 1)],
            batches=BATCHES,
            contexts=CONTEXTS,
            decode_attention_s=[[steps.decode_token_s * b * c for c in CONTEXTS] for b in BATCHES],
            chunks=CHUNKS,
            prefixes=PREFIXES,
            prefill_attention_s=[
                [beyond[new] + (steps.chunk_s(new, p) - steps.chunk_s(new, 0)) for p in PREFIXES]
                for new in CHUNKS
            ],
            source=f"calibrated on {self.engine} {self.engine_version or ''}".strip(),
        )

    def _profile(self) -> Connector | None:
        """The measured way ends with D's step for the prompt's last token, which D pays anyway."""
        if self.hop is None:
            return None
        hop_s = max(0.0, self.hop["fixed_s"] - self._one_token_step_s())
        return Connector(
            "nixl", hop_s, 0.0, self.hop["per_token_s"], synchronous=False, can_pull=True
        )

    def _one_token_step_s(self) -> float:
        """An idle node's step for one token; reading what stands before it is in the hop's line."""
        return self.overheads().host_s(1) + self.steps.chunk_s(1, 0)

    def document(self) -> dict[str, Any]:
        return {"kind": "calibration", "schema_version": SCHEMA_VERSION, **asdict(self)}


HOP_FIELDS = ("fixed_s", "per_token_s")


def _is_hop(value: object) -> bool:
    """Both figures, each a number from 0 on."""
    return (
        isinstance(value, dict)
        and value.keys() == set(HOP_FIELDS)
        and all(map(rules.NOT_NEGATIVE.takes, value.values()))
    )


_RULES = {
    "model": rules.TEXT,
    **dict.fromkeys(("block_tokens", "max_batched_tokens"), rules.TOKENS),
    **dict.fromkeys(("kv_tokens", "kv_bytes_per_token", "context_tokens"), rules.COUNT),
    "hop": rules.Rule(_is_hop, f"numbers from 0 on for {' and '.join(HOP_FIELDS)}", optional=True),
}


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file whole."""
    text = json.dumps(calibration.document(), indent=1, sort_keys=True, allow_nan=False)
    write_whole(path, text.encode() + b"\n")


def read_calibration(path: Path) -> Calibration:
    """Read what :func:`write_calibration` wrote.

    Raises:
        UsageError: the file is missing, damaged, or of another schema version.
    """
    try:
        document = json.loads(path.read_text())
        kind, version = document.pop("kind"), document.pop("schema_version")
    except FileNotFoundError:
        raise UsageError(
            f"costs {str(path)!r}: no such file; costs are measured, roofline, or a file that "
            "ppd microbench --calibrate wrote"
        ) from None
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{path} is no calibration file ({error!r}); fit it again") from error
    if (kind, version) != ("calibration", SCHEMA_VERSION):
        raise UsageError(
            f"{path}: {kind} of schema version {version}; this ppd reads calibration "
            f"{SCHEMA_VERSION}: fit it again"
        )
    try:
        return Calibration(**{**document, "steps": StepCosts(**document["steps"])})
    except (TypeError, KeyError, UsageError) as error:
        raise UsageError(f"{path} is damaged ({error}); fit it again") from error
