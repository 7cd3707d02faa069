"""``ppd run show | compare``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.output import command, show, show_json

if TYPE_CHECKING:
    from ppdbench.runs.compare import Difference

LOG_WIDTH = 140

app = typer.Typer(
    no_args_is_help=True,
    help="What is in a run, and what differs between two.",
    epilog="Example: ppd run show results/demo/run",
)

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command("show", epilog="Example: ppd run show results/demo")
@command
def show_run(
    run: RunArgument,
    *,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001
) -> None:
    """What was measured with what, how much of it may vote, and the figures by route."""
    from ppdbench.runs.store import read_manifest, read_points

    manifest, points = read_manifest(run).document(), read_points(run)
    routes = _by_route(points)
    if as_json:
        show_json(
            {
                "run": str(run),
                "manifest": manifest,
                "points": len(points),
                "by_validity": _by_validity(points),
                "routes": routes,
            }
        )
        return
    names = ("backend", "engine", "engine_version", "model", "dtype", "gpu", "connector", "seed")
    show(", ".join(f"{name} {manifest[name]}" for name in names if manifest[name] is not None))
    codes = "".join(f", {count} {code}" for code, count in _by_validity(points).items())
    show(f"{len(points)} points{codes}")
    _show_table(
        ("topology", "policy", "points", "success", "TTFT ms", "TPOT ms", "E2E s"),
        [_route_cells(row) for row in routes],
    )


@app.command(
    "compare",
    epilog="Example: ppd run compare results/demo --policy remote --against local",
)
@command
def compare(
    run: RunArgument,
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="Another run of the same grid.")
    ] = None,
    *,
    policy: Annotated[
        str | None, typer.Option(help="In one run: the policy to start from.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="In one run: the other policy.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001
) -> None:
    """Later turns of two runs, or of two policies in one, with intervals.

    Only points that may vote are compared, in pairs. A difference whose 95 % interval holds 0 is
    not significant, and is called so.
    """
    differences = _compare(run, other, policy, against)
    if as_json:
        show_json({"differences": [difference.document() for difference in differences]})
        return
    _show_table(
        ("", "metric", "points", "first", "second", "change", "95 % interval", "verdict"),
        [_difference_cells(difference) for difference in differences],
    )


def _compare(
    run: Path, other: Path | None, policy: str | None, against: str | None
) -> list[Difference]:
    from ppdbench.core.errors import NothingUsableError, UsageError
    from ppdbench.runs.compare import compare_policies, compare_runs
    from ppdbench.runs.store import read_points

    in_one = policy is not None and against is not None
    if (other is None) != in_one or (policy is None) != (against is None):
        raise UsageError(
            "compare takes two runs, or one run with --policy and --against; "
            "as in ppd run compare A B, or ppd run compare A --policy remote --against local"
        )
    points = read_points(run)
    if other is not None:
        found = compare_runs(points, read_points(other))
    else:
        assert policy is not None
        assert against is not None
        found = compare_policies(points, policy, against, lambda point: _records(run, point))
    if not found:
        raise NothingUsableError(
            "the two sides share no point that may vote; ppd run show says which points there are"
        )
    return found


def _records(run: Path, point: Mapping[str, Any]) -> Sequence[Any]:
    from ppdbench.runs.points import PointKey
    from ppdbench.runs.recording import read_records

    names = ("topology", "policy", "workload", "rate_per_s", "repeat")
    return read_records(run, PointKey(*(point[name] for name in names)).slug)


def _by_validity(points: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    from collections import Counter

    return dict(sorted(Counter(code for point in points for code in point["validity"]).items()))


def _by_route(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means of the points' means over later turns, of points that may vote."""
    from ppdbench.runs.compare import METRICS, may_vote

    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for point in points:
        if may_vote(point):
            groups.setdefault((point["topology"], point["policy"]), []).append(point)
    return [
        {
            "topology": topology,
            "policy": policy,
            "points": len(members),
            "success": _mean(point["success"] for point in members),
            **{m: _mean(point["turn2plus"][m]["mean"] for point in members) for m in METRICS},
        }
        for (topology, policy), members in groups.items()
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _route_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["topology"],
        row["policy"],
        str(row["points"]),
        f"{row['success']:.1%}",
        _milliseconds(row["ttft_s"]),
        _milliseconds(row["tpot_s"]),
        "–" if row["e2e_s"] is None else f"{row['e2e_s']:.2f}",
    ]


def _difference_cells(difference: Difference) -> list[str]:
    interval = difference.interval
    return [
        difference.group,
        difference.metric.removesuffix("_s").upper(),
        str(difference.points),
        f"{_milliseconds(difference.first_s)} ms",
        f"{_milliseconds(difference.second_s)} ms",
        f"{difference.change:+.1%}",
        "–" if interval is None else f"{interval.low:+.1%} … {interval.high:+.1%}",
        difference.verdict,
    ]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f}"


def _show_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else LOG_WIDTH).print(table)
