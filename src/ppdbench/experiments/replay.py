"""A run on real engines, played again on the simulator: same grid, same seed, fitted costs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ppdbench.core.errors import RunError
from ppdbench.experiments.choosing import Choice, choose_backend
from ppdbench.experiments.fidelity_live import report
from ppdbench.experiments.sweep import sweep
from ppdbench.runs.manifest import EngineIdentity, Manifest
from ppdbench.runs.points import PointKey
from ppdbench.runs.recording import read_records
from ppdbench.runs.records import TurnRecord
from ppdbench.runs.store import read_manifest, read_points
from ppdbench.sim.calibrated import Calibration, read_calibration

ENGINE_FIELDS = (
    "backend", "engine", "engine_version", "model", "dtype", "gpu", "connector", "block_size",
)  # fmt: skip


def compare_with_replay(live: Path, costs: Path) -> dict[str, Any]:
    """The run ``live`` beside its simulation with ``costs``, as one document without paths.

    Raises:
        PpdError: what :func:`replay` raises, or no point can be compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "run"
        replay(live, costs, again)
        compared = report(
            read_points(live), read_points(again), partial(_turns, live), partial(_turns, again)
        )
    manifest = read_manifest(live)
    return {
        "grid": manifest.grid,
        "seed": manifest.seed,
        "real": _engine(manifest.engine),
        "calibration": _calibration(read_calibration(costs)),
        **compared,
    }


def _turns(run: Path, key: PointKey) -> Sequence[TurnRecord]:
    return read_records(run, key.slug)


def _engine(engine: EngineIdentity) -> dict[str, Any]:
    """A model that is a folder goes by the folder's name."""
    known = {name: getattr(engine, name) for name in ENGINE_FIELDS}
    return known | {"model": engine.model and Path(engine.model).name}


def _calibration(fitted: Calibration) -> dict[str, Any]:
    return {
        "engine": fitted.engine,
        "engine_version": fitted.engine_version,
        "model": Path(fitted.model).name,
        "steps": asdict(fitted.steps),
        "hop": fitted.hop,
        "held_out": fitted.fit.get("held_out"),
    }


def replay(live: Path, costs: Path, folder: Path) -> None:
    """Sweep the grid of the run ``live`` on the simulator into ``folder``, with its records.

    Raises:
        RunError: the run has no seed, its grid is no longer the same, or the costs were fitted
            on an engine with another block size.
    """
    manifest = read_manifest(live)
    _refuse_other_engine(live, manifest, read_calibration(costs))
    choice = Choice(
        grid=manifest.grid,
        seed=_seed_of(live, manifest),
        jobs=1,
        keep_records=True,
        settings={"costs": str(costs)},
    )
    backend = choose_backend(choice)
    _refuse_other_grid(live, manifest, backend.measuring.grid.digest)
    sweep(backend, folder)


def _seed_of(live: Path, manifest: Manifest) -> int:
    if manifest.seed is None:
        raise RunError(
            f"{live} states no seed, so its arrivals cannot be drawn again; give a run that "
            "ppd sweep made"
        )
    return manifest.seed


def _refuse_other_grid(live: Path, manifest: Manifest, digest: str) -> None:
    if manifest.grid_digest != digest:
        raise RunError(
            f"{live}: its grid {manifest.grid} has digest {manifest.grid_digest} and the file of "
            f"that name {digest}; measure the run again, or bring the grid's file back"
        )


def _refuse_other_engine(live: Path, manifest: Manifest, fitted: Calibration) -> None:
    block_tokens = manifest.engine.block_size
    if block_tokens is not None and block_tokens != fitted.block_tokens:
        raise RunError(
            f"{live} ran with KV blocks of {block_tokens} tokens and the costs were fitted with "
            f"{fitted.block_tokens}; calibrate on the engine that served the run"
        )
