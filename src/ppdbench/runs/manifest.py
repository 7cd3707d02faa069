"""What a run was made with: enough to repeat it, and to refuse to mix it with another."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from ppdbench import __version__
from ppdbench.core.errors import RunError
from ppdbench.core.gpus import gpu_system

SCHEMA_VERSION = 1

RESUME_FIELDS = (
    "schema_version", "backend", "engine", "engine_version", "model", "dtype", "gpu", "connector",
    "block_size", "flags", "tool_version", "seed", "stop_width", "goodput_limits", "grid_digest",
    "workload_digests",
)  # fmt: skip
"""A resumed run must agree in these: anything else would be another experiment in one folder."""

POOL_FIELDS = (
    "backend", "model", "dtype", "gpu", "engine_version", "connector", "block_size",
    "tensor_parallel",
)  # fmt: skip
"""Runs pooled into one table must agree in these, and in the digest of each shared workload."""

BACKEND_FIELDS = frozenset({"backend", "engine_version"})
"""What a simulated and a live run may differ in: a simulator is no version of an engine."""


SIMULATED = "sim"
"""The backend whose figures come from no engine."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What served the requests. ``None`` is unknown. ``flags`` are whatever changes the numbers."""

    backend: str
    engine: str
    engine_version: str | None = None
    model: str | None = None
    dtype: str | None = None
    gpu: str | None = None
    connector: str | None = None
    block_size: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


def _host() -> dict[str, str]:
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


@cache
def _commit() -> str | None:
    """The checkout's commit, when the tool runs from one and git is there to ask."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    asked = subprocess.run(  # noqa: S603
        ["git", "-C", str(root), "rev-parse", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or None


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``. ``host`` and ``commit`` are for people; no rule looks at them.

    ``stop_width`` is the rule that ended the repeats, ``None`` where all were run;
    ``goodput_limits`` is what goodput was counted by, ``None`` where the run does not say.
    """

    engine: EngineIdentity
    grid: str = ""
    seed: int | None = None
    grid_digest: str | None = None
    workload_digests: Mapping[str, str] = field(default_factory=dict)
    stop_width: float | None = None
    goodput_limits: Mapping[str, float] | None = None
    schema_version: int = SCHEMA_VERSION
    tool_version: str = __version__
    commit: str | None = field(default_factory=_commit)
    host: Mapping[str, str] = field(default_factory=_host)

    def document(self) -> dict[str, Any]:
        """Flat, as in the file."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "engine"}
        return json_object({**own, **asdict(self.engine)})

    @classmethod
    def of(cls, document: Mapping[str, Any], source: str) -> Manifest:
        """Raises RunError for another schema version or a missing field."""
        version = document.get("schema_version")
        if version != SCHEMA_VERSION:
            raise RunError(
                f"{source}: schema version {version!r}; this ppd reads version {SCHEMA_VERSION}. "
                "Use the ppd version that wrote the run, or measure again"
            )
        engine = {f.name for f in fields(EngineIdentity)}
        own = {f.name for f in fields(cls)} - {"engine"}
        try:
            return cls(
                EngineIdentity(**{k: v for k, v in document.items() if k in engine}),
                **{k: v for k, v in document.items() if k in own},
            )
        except TypeError as error:
            raise RunError(f"{source} is damaged ({error}); measure the run again") from error


def json_object(document: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file: tuples are lists, keys are strings."""
    plain: dict[str, Any] = json.loads(json.dumps(document, default=dict))
    return plain


def first_difference(
    left: Mapping[str, Any], right: Mapping[str, Any], names: Iterable[str]
) -> tuple[str, Any, Any] | None:
    """The first of ``names`` in which two documents differ; inner fields by a dotted name."""
    for name in names:
        mine, theirs = left.get(name), right.get(name)
        if mine == theirs:
            continue
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            inner = first_difference(mine, theirs, sorted({*mine, *theirs}))
            assert inner is not None
            return f"{name}.{inner[0]}", inner[1], inner[2]
        return name, mine, theirs
    return None


def refuse_other_run(folder: Path, stored: Manifest, wanted: Manifest) -> None:
    """A run continues only as what it began as.

    Raises:
        RunError: naming the field, what the run has and what was asked for.
    """
    unsaid = {"goodput_limits"} if stored.goodput_limits is None else set()
    names = [name for name in RESUME_FIELDS if name not in unsaid]
    difference = first_difference(stored.document(), wanted.document(), names)
    if difference is not None:
        name, has, asked = difference
        raise RunError(
            f"{folder} cannot be resumed: {name} is {has!r} in the run and {asked!r} now; "
            "restore it, or start a new run with another -o"
        )


def refuse_to_pool(runs: Mapping[str, Manifest], *, across_backends: bool = False) -> None:
    """Runs that measured different things make no common table. Keys are the runs' names.

    Every pair is looked at: two live runs must agree in all fields, also beside a simulated one.
    ``across_backends`` lets a simulated run stand beside a live one (:data:`BACKEND_FIELDS`).

    Raises:
        RunError: naming the two runs, the field and both values.
    """
    for (first_name, first), (name, other) in combinations(runs.items(), 2):
        mixed = (first.engine.backend == SIMULATED) != (other.engine.backend == SIMULATED)
        exempt = BACKEND_FIELDS if across_backends and mixed else frozenset()
        names = [field_name for field_name in POOL_FIELDS if field_name not in exempt]
        difference = first_difference(_comparable(first), _comparable(other), names)
        difference = difference or _workload_difference(first, other)
        if difference is not None:
            field_name, mine, theirs = difference
            raise RunError(
                f"{first_name} and {name} do not mix: {field_name} is {mine!r} in the first and "
                f"{theirs!r} in the second; build one table from each"
            )


def _comparable(manifest: Manifest) -> dict[str, Any]:
    """The document with what has several spellings brought to one: GPU names, a width of 1."""
    document = manifest.document()
    widths = document["flags"].get("tensor_parallel") or {}
    wide = {role: width for role, width in widths.items() if width != 1}
    return {**document, "gpu": gpu_system(document["gpu"]), "tensor_parallel": wide}


def _workload_difference(left: Manifest, right: Manifest) -> tuple[str, Any, Any] | None:
    shared = sorted(left.workload_digests.keys() & right.workload_digests.keys())
    difference = first_difference(left.workload_digests, right.workload_digests, shared)
    return difference and (f"workload_digests.{difference[0]}", *difference[1:])
