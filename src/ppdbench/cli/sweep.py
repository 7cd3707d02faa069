"""``ppd sweep``."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.cluster import launch_options
from ppdbench.cli.modes import DEVICES_OF, refuse_elsewhere, typed_options
from ppdbench.cli.output import command, if_interrupted, say, show, show_json
from ppdbench.core.errors import UsageError

if TYPE_CHECKING:
    from ppdbench.cluster.contract import ClusterSpec
    from ppdbench.experiments.backends import Backend
    from ppdbench.experiments.sweep import SweepResult

EPILOG = "Example: ppd sweep --grid demo --seed 1 -o results/demo"

LAUNCHED, LIVE = ("vllm",), ("vllm", "attach")
BACKENDS_OF = {
    **dict.fromkeys(("costs", "jobs", "trace"), ("sim",)),
    "gpu": ("sim", "attach"),
    "model": ("sim", "vllm"),
    **dict.fromkeys(("device", "gpus", "tp", "vllm", "max_model_len", "dummy_weights"), LAUNCHED),
    **dict.fromkeys(("engine_arg", "ready_within"), LAUNCHED),
    **dict.fromkeys(("cluster", "node"), ("attach",)),
    **dict.fromkeys(
        ("dtype", "point_timeout", "warm_up", "no_canaries", "emulate_link", "max_hand_offs"), LIVE
    ),
}
"""Options that not every backend reads."""


@command
def sweep(
    context: typer.Context,
    *,
    grid: Annotated[str, typer.Option(help="A grid of workloads/ by name, or a TOML file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder; default results/GRID-TIME.")
    ] = None,
    backend: Annotated[str, typer.Option(help="sim, vllm or attach.")] = "sim",
    seed: Annotated[int, typer.Option(help="Root of every random choice.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Measure what is missing of the run in -o.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the points and say about how long; run none.")
    ] = False,
    stop_width: Annotated[
        float | None,
        typer.Option(
            help="Stop repeating where mean TTFT and TPOT are known within ± this share.", min=0
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes for simulated points; 0: one per core.")
    ] = 0,
    keep_records: Annotated[
        bool, typer.Option("--keep-records", help="Keep each turn, as Parquet.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for a Chrome trace of each simulated point.")
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="Goodput's TTFT limit, seconds.", min=0)] = 0.5,
    slo_tpot: Annotated[float, typer.Option(help="Goodput's TPOT limit, seconds.", min=0)] = 0.03,
    model: Annotated[
        str | None, typer.Option(help="Model; default: Llama-3.1-8B (sim), a tiny Llama (CPU).")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU that is simulated, or attached; default h100_sxm.")
    ] = None,
    connector: Annotated[str | None, typer.Option(help="KV connector; default nixl.")] = None,
    costs: Annotated[
        str | None,
        typer.Option(help="sim: measured, roofline, or a file of microbench --calibrate."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Weights and KV of engines; launched ones default to bfloat16."),
    ] = None,
    device: Annotated[str, typer.Option(help="vllm: cuda or cpu.")] = "cuda",
    gpus: Annotated[str, typer.Option(help="vllm: device ids, as in 0,1,2,3.")] = "",
    tp: Annotated[str, typer.Option(help="vllm: tensor parallel, as in 2 or P=2,D=1.")] = "1",
    vllm: Annotated[str | None, typer.Option(help="vllm: the python that has vLLM.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="vllm: longest sequence.")
    ] = None,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="vllm: random weights, nothing is loaded.")
    ] = False,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="vllm: passed on as it is; may be repeated.")
    ] = None,
    ready_within: Annotated[float, typer.Option(min=1, help="vllm: seconds to wait.")] = 600.0,
    cluster: Annotated[Path | None, typer.Option(help="attach: a cluster.toml.")] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="attach: ROLE=URL; repeat for each node.")
    ] = None,
    point_timeout: Annotated[
        float, typer.Option(min=1, help="vllm, attach: seconds until a point has failed.")
    ] = 900.0,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="vllm, attach: conversations before each point.")
    ] = None,
    no_canaries: Annotated[
        bool, typer.Option("--no-canaries", help="vllm, attach: do not compare the routes' tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    emulate_link: Annotated[
        float | None,
        typer.Option(min=0.001, help="vllm, attach: GB/s that hand-offs are slowed down to."),
    ] = None,
    max_hand_offs: Annotated[
        int | None,
        typer.Option(min=1, help="vllm, attach: hand-offs out at once per P; others wait."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001
) -> None:
    """Measure every point of a grid into a run folder.

    Interrupted or killed, it continues with --resume and loses at most the points in flight.
    """
    from ppdbench.experiments.choosing import Choice, choose_backend
    from ppdbench.experiments.live import LiveOptions
    from ppdbench.runs.aggregate import Limits

    _check(typed_options(context), backend, device)
    _check_finite(slo_ttft=slo_ttft, slo_tpot=slo_tpot, stop_width=stop_width)
    choice = Choice(
        grid=grid,
        backend=backend,
        seed=seed,
        jobs=jobs,
        keep_records=keep_records,
        traces=trace,
        limits=Limits(slo_ttft, slo_tpot),
        settings={"gpu": gpu, "model": model, "connector": connector, "costs": costs},
        dtype=dtype,
        launch=launch_options(
            model=model, device=device, gpus=gpus, tp=tp, connector=connector or "nixl", vllm=vllm,
            dtype=dtype or "bfloat16", max_model_len=max_model_len, dummy_weights=dummy_weights,
            engine_args=tuple(engine_arg or ()), ready_within_s=ready_within,
        ),
        cluster=_cluster(cluster, node or []),
        live=LiveOptions(
            point_timeout, warm_up, canaries=not no_canaries, emulated_gb_per_s=emulate_link,
            max_hand_offs=max_hand_offs,
        ),
    )  # fmt: skip
    folder = _folder(out, grid, resume=resume)
    chosen = choose_backend(choice, folder / "logs", say)
    if dry_run:
        _show_plan(chosen, as_json=as_json)
        return
    result = _run(chosen, folder, stop_width, resume=resume)
    _show_result(result, as_json=as_json)
    if not result.ok:
        raise typer.Exit(1)


def _check(typed: set[str], backend: str, device: str) -> None:
    from ppdbench.experiments.choosing import check_backend

    check_backend(backend)
    refuse_elsewhere(typed, BACKENDS_OF, "backend", backend)
    refuse_elsewhere(typed, DEVICES_OF, "device", device)


def _check_finite(**options: float | None) -> None:
    """A manifest is JSON, which has no infinity."""
    for name, value in options.items():
        if value is not None and not isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; give a finite number")


def _cluster(path: Path | None, nodes: list[str]) -> ClusterSpec | None:
    from ppdbench.cluster.contract import named_cluster

    return named_cluster(path, nodes) if path or nodes else None


def _folder(out: Path | None, grid: str, *, resume: bool) -> Path:
    import time

    if out is not None:
        return out
    if resume:
        raise UsageError("--resume continues the run in -o, and there is no -o; name its folder, "
                         "as in --resume -o results/GRID-20260131-120000")  # fmt: skip
    return Path("results") / f"{Path(grid).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _run(backend: Backend, folder: Path, stop_width: float | None, *, resume: bool) -> SweepResult:
    from ppdbench.cli.progress import counting_progress, sweep_progress
    from ppdbench.experiments.sweep import sweep as run_sweep

    backend.measuring.grid.prepare(counting_progress())
    for notice in backend.measuring.grid.notices():
        say(f"ppd: {notice}")
    resumable = f"the same command with --resume -o {folder} measures what is missing"
    with if_interrupted(resumable), sweep_progress() as report:
        result = run_sweep(backend, folder, resume=resume, stop_width=stop_width, report=report)
    effort = result.effort
    if effort.events and effort.wall_s > 0:
        say(
            f"sweep: {effort.turns / effort.wall_s:,.0f} requests/s and "
            f"{effort.events / effort.wall_s:,.0f} events/s in {effort.wall_s:.1f} s"
        )
    return result


def _show_plan(backend: Backend, *, as_json: bool) -> None:
    """``points`` is their number, as in a finished sweep; ``points_list`` is each of them."""
    from dataclasses import asdict

    keys = backend.measuring.grid.points()
    expected_s = round(backend.expected_s(keys), 1)
    listed = [asdict(key) for key in keys]
    if as_json:
        show_json({"points": len(keys), "expected_s": expected_s, "points_list": listed})
        return
    show("\n".join(map(_point_line, listed)))
    show(f"{len(keys)} points, about {expected_s:g} s")


def _point_line(point: dict[str, Any]) -> str:
    return (
        f"{point['topology']} {point['policy']} {point['workload']} "
        f"{point['rate_per_s']:g} repeat {point['repeat']}"
    )


def _show_result(result: SweepResult, *, as_json: bool) -> None:
    if as_json:
        show_json(result.document())
        return
    codes = ", ".join(f"{count} {code}" for code, count in result.by_validity.items())
    show(f"{result.run}: {result.points} points, {result.ok} ok" + (f"; {codes}" if codes else ""))
