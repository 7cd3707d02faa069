"""``ppd microbench``: what prefills do to the other requests of a node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.modes import typed_options
from ppdbench.cli.output import command, if_interrupted, say, show_json

if TYPE_CHECKING:
    from ppdbench.experiments.microbench.attribution_run import AttributionPlan
    from ppdbench.experiments.microbench.bench import Finished
    from ppdbench.experiments.microbench.engines import Chosen
    from ppdbench.experiments.microbench.handoff import HandoffPlan
    from ppdbench.experiments.microbench.plan import InterferencePlan

EPILOG = "Example: ppd microbench --backend vllm --device cpu -o results/interference"

BACKENDS = ("sim", "vllm", "attach")
PROTOCOLS = ("interference", "paper", "handoff")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The experiment's options as typed."""

    batch: str | None
    context: str | None
    new: str | None
    repeats: int
    seed: int
    victim_context: int
    shared_prefix: bool
    doses: int
    dose_rate: float | None
    dose_output: int
    tokens: str | None
    load: str | None

    @property
    def explicit(self) -> bool:
        return any(asked is not None for asked in (self.batch, self.context, self.new))


@command
def microbench(
    context_of: typer.Context,
    *,
    backend: Annotated[str, typer.Option(help="sim, vllm or attach.")] = "sim",
    protocol: Annotated[
        str,
        typer.Option(help="interference, paper (the published test and its controls) or handoff."),
    ] = "interference",
    batch: Annotated[
        str | None, typer.Option(help="Victims, as in 1,4,16 [what the engine holds].")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Cached tokens of an append, as in 512,2048.")
    ] = None,
    new: Annotated[str | None, typer.Option(help="New tokens of an append, as in 32,512.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each dose is given.")] = 10,
    seed: Annotated[int, typer.Option(help="Root of every random choice.")] = 0,
    victim_context: Annotated[int, typer.Option(min=2, help="Prompt of each victim.")] = 256,
    shared_prefix: Annotated[
        bool, typer.Option("--shared-prefix", help="Victims share their prompt but for a token.")
    ] = False,
    doses: Annotated[int, typer.Option(min=1, help="Requests injected per dose.")] = 1,
    dose_rate: Annotated[
        float | None, typer.Option(help="Injected requests per second [all at once].")
    ] = None,
    dose_output: Annotated[int, typer.Option(min=1, help="Tokens an injected one makes.")] = 1,
    tokens: Annotated[
        str | None, typer.Option(help="Hand-off: prompt lengths, as in 128,2048.")
    ] = None,
    load: Annotated[
        str | None, typer.Option(help="Hand-off: decodes beside it, as in 0,8.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Simulated GPU [h100_sxm].")] = None,
    model: Annotated[str | None, typer.Option(help="Model.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu, of a launched vLLM.")] = "cuda",
    gpus: Annotated[str | None, typer.Option(help="Device ids of a launched vLLM.")] = None,
    vllm: Annotated[str | None, typer.Option(help="Python that has vLLM.")] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="One more argument for a launched vLLM.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="ROLE=URL of an attached engine.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="cluster.toml of attached nodes.")] = None,
    keep_records: Annotated[
        bool, typer.Option("--keep-records", help="Keep simulated tokens; live ones always stay.")
    ] = False,
    calibrate: Annotated[
        Path | None, typer.Option(help="Fit the simulator's costs and write them to this file.")
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="With --calibrate: measured before, in this folder."),
    ] = None,
    max_error: Annotated[
        float, typer.Option(min=0, help="With --calibrate: bound of the held-out median error.")
    ] = 0.10,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds; what is complete by then is the result.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the result and raw tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001
) -> None:
    """Measure how much a full prefill and an append slow the decodes beside them."""
    typed = typed_options(context_of)
    _check(typed, out, calibrate, backend=backend, protocol=protocol, device=device)
    if calibrate is not None and source:
        _fit(source, calibrate, seed, max_error, as_json=as_json)
        return
    from ppdbench.experiments.microbench.engines import Chosen

    chosen = Chosen(
        backend,
        model,
        device,
        vllm,
        gpus=tuple(gpus.split(",")) if gpus else (),
        engine_args=tuple(engine_arg or ()),
        urls=tuple(node or ()),
        cluster_file=cluster,
        settings={"gpu": gpu},
    )
    wanted = _Wanted(
        batch, context, new, repeats, seed, victim_context, shared_prefix, doses, dose_rate,
        dose_output, tokens, load,
    )  # fmt: skip
    with if_interrupted(
        "no measurement was kept; --time-limit ends a live run with what is complete"
    ):
        finished = _run(chosen, protocol, wanted, keep_records=keep_records, time_limit=time_limit)
    _keep(finished, out)
    if calibrate is not None:
        finished.document["calibration"] = _fit_document(
            [finished.document], calibrate, seed, max_error
        )
    _show(finished, as_json=as_json)
    _refuse_empty(finished)


def _refuse_empty(finished: Finished) -> None:
    """Last of all: what was left out is on the screen by then."""
    from ppdbench.core.errors import NothingUsableError

    if not finished.document["rows"]:
        raise NothingUsableError(
            "nothing was measured whole, so there is no row; what was sent is in records/ with -o, "
            "and a larger --time-limit or a quieter machine may help"
        )


def _check(
    typed: set[str],
    out: Path | None,
    calibrate: Path | None,
    *,
    backend: str,
    protocol: str,
    device: str,
) -> None:
    """Say before the run what would fail after it."""
    from ppdbench.cli.microbench_options import refuse_contradictions, refuse_unwritable
    from ppdbench.core.errors import UsageError
    from ppdbench.experiments.microbench.results import refuse_existing

    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is unknown; backends are {', '.join(BACKENDS)}")
    if protocol not in PROTOCOLS:
        raise UsageError(f"protocol {protocol!r} is unknown; protocols are {', '.join(PROTOCOLS)}")
    refuse_contradictions(typed, backend=backend, protocol=protocol, device=device)
    if calibrate is not None:
        refuse_unwritable(calibrate)
    if out is not None:
        refuse_existing(out)


def _run(
    chosen: Chosen,
    protocol: str,
    wanted: _Wanted,
    *,
    keep_records: bool,
    time_limit: float | None,
) -> Finished:
    from ppdbench.experiments.microbench import bench
    from ppdbench.experiments.microbench.engines import Clock

    manner = bench.Manner(say, keep_records, Clock(time_limit))
    if protocol == "handoff":
        return bench.run_handoff(chosen, _handoff_plan(chosen, wanted), manner)
    if protocol == "paper":
        return bench.run_attribution(chosen, _attribution_plan(chosen, wanted), manner)
    plan = _interference_plan(chosen, wanted)
    return bench.run_interference(chosen, plan, manner, explicit=wanted.explicit)


def _interference_plan(chosen: Chosen, wanted: _Wanted) -> InterferencePlan:
    from ppdbench.experiments.microbench.plan import CPU_GRID, DEFAULT_GRID, InterferencePlan

    batches, contexts, new_tokens = CPU_GRID if chosen.is_cpu else DEFAULT_GRID
    return InterferencePlan(
        _counts(wanted.batch, "batch") or batches,
        _counts(wanted.context, "context") or contexts,
        _counts(wanted.new, "new") or new_tokens,
        repeats=wanted.repeats,
        seed=wanted.seed,
        victim_context_tokens=wanted.victim_context,
        shared_prefix=wanted.shared_prefix,
        doses=wanted.doses,
        dose_rate_per_s=wanted.dose_rate,
        dose_output_tokens=wanted.dose_output,
    )


def _attribution_plan(chosen: Chosen, wanted: _Wanted) -> AttributionPlan:
    from ppdbench.experiments.microbench.attribution_run import AttributionPlan, default_batches
    from ppdbench.experiments.microbench.engines import no_cascade_switch

    batches, control_batch = default_batches(_counts(wanted.batch, "batch"), cpu=chosen.is_cpu)
    return AttributionPlan(
        batches,
        control_batch,
        repeats=wanted.repeats,
        seed=wanted.seed,
        no_cascade_switch=no_cascade_switch(chosen),
    )


def _handoff_plan(chosen: Chosen, wanted: _Wanted) -> HandoffPlan:
    from ppdbench.experiments.microbench.handoff import CPU_PLAN, HandoffPlan

    plan = CPU_PLAN if chosen.is_cpu else HandoffPlan()
    return replace(
        plan,
        tokens=_counts(wanted.tokens, "tokens") or plan.tokens,
        load_streams=_counts(wanted.load, "load") or plan.load_streams,
        repeats=wanted.repeats,
        seed=wanted.seed,
    )


def _counts(text: str | None, name: str) -> tuple[int, ...]:
    from ppdbench.core.errors import UsageError

    try:
        return (
            tuple(dict.fromkeys(int(part) for part in text.split(","))) if text is not None else ()
        )
    except ValueError:
        raise UsageError(f"--{name} {text!r}: whole numbers with commas, as in 1,4,16") from None


def _fit(folders: list[Path], into: Path, seed: int, max_error: float, *, as_json: bool) -> None:
    """Calibrate from results that are there already."""
    from ppdbench.experiments.microbench.results import read_result

    document = _fit_document([read_result(folder) for folder in folders], into, seed, max_error)
    if as_json:
        show_json(document)


def _fit_document(
    documents: list[dict[str, Any]], into: Path, seed: int, max_error: float
) -> dict[str, Any]:
    from ppdbench.experiments.microbench.calibrate import calibrate_from, refuse_bad_fit
    from ppdbench.sim.calibrated import write_calibration

    made = calibrate_from(documents, seed=seed, into=into)
    refuse_bad_fit(made, max_error)
    write_calibration(into, made)
    held = made.fit["held_out"]["all"]
    say(
        f"{into}: the simulator meets {made.fit['held_out_cells']} held-out cells with a median "
        f"error of {held['median']:.1%} (p90 {held['p90']:.1%}); ppd sweep --costs {into} uses it"
    )
    return made.document()


def _keep(finished: Finished, out: Path | None) -> None:
    """Before any fit: a fit that is refused must not cost the measurement."""
    from ppdbench.experiments.microbench.results import write_result

    if out is not None:
        write_result(out, finished.manifest, finished.document, finished.records)
        say(f"result and raw tokens are in {out}; ppd plot {out} -o DIR draws them")


def _show(finished: Finished, *, as_json: bool) -> None:
    from ppdbench.cli.microbench_tables import show_document

    if as_json:
        show_json(finished.document)
    else:
        show_document(finished.document)
