"""``ppd microbench``: what prefills do to the other requests of a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.output import command, say, show, show_json

if TYPE_CHECKING:
    from ppdbench.experiments.microbench.bench import Chosen, Finished

EPILOG = "Example: ppd microbench --backend vllm --device cpu -o results/interference"

DEFAULT_GRID = ((1, 4, 16, 50, 100, 200), (0, 256, 2048, 8192, 32768, 65536),
                (16, 64, 128, 512, 1024, 4096))  # fmt: skip
CPU_GRID = ((1, 4, 16), (512, 2048), (32, 128, 512))
"""What a laptop measures in a few minutes."""


@command
def microbench(
    *,
    backend: Annotated[str, typer.Option(help="sim, vllm or attach.")] = "sim",
    protocol: Annotated[str, typer.Option(help="interference.")] = "interference",
    batch: Annotated[
        str | None, typer.Option(help="Victims, as in 1,4,16 [limited by the engine].")
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
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the result and raw tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001
) -> None:
    """Measure how much a full prefill and an append slow the decodes beside them."""
    from ppdbench.core.errors import UsageError
    from ppdbench.experiments.microbench.bench import Chosen, run_interference
    from ppdbench.experiments.microbench.plan import InterferencePlan
    from ppdbench.experiments.microbench.results import refuse_existing

    if backend not in ("sim", "vllm", "attach"):
        raise UsageError(f"backend {backend!r} is unknown; backends are sim, vllm and attach")
    if protocol != "interference":
        raise UsageError(f"protocol {protocol!r} is unknown; there is: interference")
    if out is not None:
        refuse_existing(out)
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
    batches, contexts, new_tokens = _grid(chosen, batch, context, new)
    plan = InterferencePlan(
        batches,
        contexts,
        new_tokens,
        repeats=repeats,
        seed=seed,
        victim_context_tokens=victim_context,
        shared_prefix=shared_prefix,
        doses=doses,
        dose_rate_per_s=dose_rate,
        dose_output_tokens=dose_output,
    )
    finished = run_interference(
        chosen,
        plan,
        explicit=any((batch, context, new)),
        keep_records=keep_records,
        tell=say,
    )
    _deliver(finished, out, as_json=as_json)


def _grid(
    chosen: Chosen, batch: str | None, context: str | None, new: str | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    batches, contexts, new_tokens = (
        CPU_GRID if chosen.backend == "vllm" and chosen.device == "cpu" else DEFAULT_GRID
    )
    return (
        _counts(batch, "batch") if batch else batches,
        _counts(context, "context") if context else contexts,
        _counts(new, "new") if new else new_tokens,
    )


def _counts(text: str, name: str) -> tuple[int, ...]:
    from ppdbench.core.errors import UsageError

    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--{name} {text!r}: whole numbers with commas, as in 1,4,16") from None


def _deliver(finished: Finished, out: Path | None, *, as_json: bool) -> None:
    from ppdbench.experiments.microbench.results import write_result

    if out is not None:
        write_result(out, finished.manifest, finished.document, finished.records)
        say(f"result and raw tokens are in {out}; ppd plot {out} -o DIR draws them")
    if as_json:
        show_json(finished.document)
    else:
        _show_rows(finished.document)


def _show_rows(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "batch", "context", "new", "slowdown", "95 %", "TPOT ms", "p99 gap ms",
                  "largest ms", "TTFT ms", title=_title(document))  # fmt: skip
    for row in document["rows"]:
        table.add_row(*_cells(row))
    Console().print(table)
    show(document["finding"])


def _title(document: dict[str, Any]) -> str:
    kind = "SIMULATED" if document["simulated"] else "measured"
    return f"Decode slowdown, {kind}: {document['model']} on {document['gpu'] or 'its engine'}"


def _cells(row: dict[str, Any]) -> list[str]:
    interval = row["slowdown_ci"]
    return [
        row["kind"],
        str(row["batch"]),
        f"{row['context_tokens']:,}",
        f"{row['new_tokens']:,}",
        f"{row['slowdown_mean']:+.1%}",
        "–" if interval is None else f"{interval[0]:+.1%} … {interval[1]:+.1%}",
        *(
            f"{row[name] * 1e3:.1f}"
            for name in ("tpot_dosed_s", "itl_p99_s", "max_gap_s", "injected_ttft_s")
        ),
    ]
