"""Other people's result folders as runs of kind ``imported``.

``vllm_ppd`` reads the folders that the PPD authors' harness writes:
``CONFIG/CONFIG_WORKLOAD_QPS.json``, one file per point. Its figures are kept as given, in seconds;
what it never recorded (cached tokens, percentiles but p50 and p99, intervals) is ``None``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdbench.core.errors import RunError, UsageError
from ppdbench.core.topology import NAMED_TOPOLOGIES, Topology
from ppdbench.runs.manifest import EngineIdentity, Manifest
from ppdbench.runs.points import PointKey
from ppdbench.runs.store import RunWriter
from ppdbench.runs.validity import MIN_LATER_TURNS, MIN_SUCCESS, Validity

GRID = "paper-synthetic"
"""Our grid of the same workloads and rates, so that ``ppd table plan`` can go on from there."""
POLICY = "roles"
"""The authors route by role: a configuration's pD nodes serve later turns locally."""

TURN_1 = {"small": (128, 128), "large": (1024, 1024)}
TURN_2 = {
    "tiny": (16, 32),
    "short_gen": (32, 256),
    "long_gen": (32, 512),
    "very_long_gen": (64, 1024),
    "small_bal": (64, 64),
    "mid_bal": (128, 128),
    "mid_paste": (256, 64),
    "big_paste": (512, 64),
    "huge_paste": (1024, 32),
}
"""Nominal (input, output) tokens of the authors' workloads; true lengths were not recorded."""

LARGEST = 1e12
"""Above any count, rate or time of a measurement."""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Imported:
    """Points in a stable order, and files of the full grid that are not there."""

    points: list[dict[str, Any]]
    missing: list[str]

    @property
    def below_95(self) -> int:
        return sum(point["success"] < MIN_SUCCESS for point in self.points)


def vllm_ppd(folder: Path) -> Imported:
    """Read every point below ``folder``: the sweep's folder, one above it, or one configuration's.

    Raises:
        RunError: no point there, an unreadable file, or two files for one point.
    """
    found: dict[PointKey, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(_results(folder)):
        key, point = _read_point(path)
        if key in found:
            raise RunError(
                f"{path} and {found[key][0]} are both {key.slug}; remove one and import again"
            )
        found[key] = path, point
    if not found:
        raise RunError(
            f"{folder}: no CONFIG/CONFIG_WORKLOAD_QPS.json in it; "
            "give the folder that holds the configurations' folders"
        )
    keys = sorted(found, key=_order)
    return Imported([found[key][1] for key in keys], _missing(found))


def _results(folder: Path) -> Iterable[Path]:
    """Files that are named after the folder they lie in; others are not results."""
    paths = folder.resolve().rglob("*.json")
    return (path for path in paths if path.name.startswith(f"{path.parent.name}_"))


def _order(key: PointKey) -> tuple[int, str, str, float]:
    """The paper's order of topologies first, unknown ones behind."""
    known = key.topology in NAMED_TOPOLOGIES
    place = NAMED_TOPOLOGIES.index(key.topology) if known else len(NAMED_TOPOLOGIES)
    return place, key.topology, key.workload, key.rate_per_s


def _missing(keys: Iterable[PointKey]) -> list[str]:
    """Points that the product of what was found has and the folder has not."""
    there = set(keys)
    product = (
        PointKey(topology, POLICY, workload, rate)
        for topology in sorted({key.topology for key in there})
        for workload in sorted({key.workload for key in there})
        for rate in sorted({key.rate_per_s for key in there})
    )
    return [key.slug for key in product if key not in there]


def _read_point(path: Path) -> tuple[PointKey, dict[str, Any]]:
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        key = _key(document)
        return key, _point(key, document)
    except (UsageError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not a result of the vllm-ppd harness ({type(error).__name__}: {error}); "
            "remove it or restore it, and import again"
        ) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no measurement")


def _number(document: Document, name: str, largest: float = LARGEST) -> Any:  # noqa: ANN401
    """The figure as given; a text, a truth value, a negative or an endless one is none."""
    value = document[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= largest:
        raise ValueError(f"{name} is {value!r}, expected a number from 0 to {largest:g}")
    return value


def _count(document: Document, name: str) -> int:
    value = _number(document, name)
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, expected a whole number")
    return value


def _key(document: Document) -> PointKey:
    """From the content: file names hold the rate as ``8`` or as ``8.0``."""
    topology = str(Topology.parse(document["config"]))
    return PointKey(topology, POLICY, document["workload"], _rate(document))


def _rate(document: Document) -> float:
    rate = float(_number(document, "qps"))
    if not rate:
        raise ValueError("qps is 0, expected conversations per second above 0")
    return rate


def _point(key: PointKey, document: Document) -> dict[str, Any]:
    turn1, turn2, both = (document[name] for name in ("turn1", "turn2", "average"))
    lengths = _lengths(key.workload)
    throughput = document["throughput"]
    rates = {
        "requests_per_s": _number(throughput, "requests_per_sec"),
        "output_tokens_per_s": _number(throughput, "tokens_per_sec"),
    }
    point = {
        "topology": key.topology,
        "policy": key.policy,
        "workload": key.workload,
        "rate_per_s": key.rate_per_s,
        "repeat": key.repeat,
        "seed": None,
        "success": _number(document, "success_rate", 100) / 100,
        "conversations": _count(turn1, "count"),
        "turns": _count(document, "total_requests"),
        "failures": _failures(document),
        **dict.fromkeys(rates),
        "with_drain": {**rates, "drain_s": None},
        "bytes_moved": None,
        "recomputed_tokens": None,
        "turn1": _group(turn1, lengths[0]),
        "turn2plus": _group(turn2, lengths[1]),
        "all": _group(both, (None, None, None)),
    }
    return {**point, "validity": [str(code) for code in _validity(point)]}


def _failures(document: Document) -> dict[str, int]:
    failed = _count(document, "failed_requests")
    return {str(document["error"] or "unknown"): failed} if failed else {}


def _validity(point: Document) -> Iterable[Validity]:
    if point["success"] < MIN_SUCCESS:
        yield Validity.ERRORS
    if point["turn2plus"]["n"] < MIN_LATER_TURNS:
        yield Validity.TOO_FEW


Lengths = tuple[int | None, int | None, int | None]


def _lengths(workload: str) -> tuple[Lengths, Lengths]:
    """Nominal (context, new, output) tokens of Turn 1 and of Turn 2."""
    first, _, second = workload.partition("_")
    new_1, output_1 = TURN_1[first]
    new_2, output_2 = TURN_2[second]
    return (0, new_1, output_1), (new_1 + output_1, new_2, output_2)


def _group(turn: Document, lengths: Lengths) -> dict[str, Any]:
    context, new, output = lengths
    return {
        "n": _count(turn, "count"),
        "ttft_s": _stats(turn, "ttft"),
        "ttft_sent_s": None,
        "tpot_s": _stats(turn, "tpot"),
        "itl_s": None,
        "e2e_s": _stats(turn, "e2e"),
        "context_tokens": {"mean": context},
        "new_tokens": {"mean": new},
        "effective_new_tokens": {"mean": None},
        "output_tokens": {"mean": output},
    }


def _stats(turn: Document, name: str) -> dict[str, float | None]:
    """Milliseconds to seconds; a group without a turn has no figure, although its file says 0."""
    given = {"mean": "avg", "p50": "p50", "p99": "p99"}
    figures = {
        stat: _number(turn, f"{prefix}_{name}_ms") / 1000 if turn["count"] else None
        for stat, prefix in given.items()
    }
    return {**figures, "p90": None, "p95": None}


def write_imported(
    imported: Imported, folder: Path, *, model: str | None = None, gpu: str | None = None
) -> None:
    """A run folder of kind ``imported``; what neither the files nor the caller say is ``None``."""
    engine = EngineIdentity(
        backend="imported",
        engine="vllm",
        model=model,
        gpu=gpu,
        connector="P2pNcclConnector",
        flags={"lengths": "nominal"},
    )
    with RunWriter(folder, Manifest(engine, grid=GRID)) as run:
        run.write_points(imported.points)
