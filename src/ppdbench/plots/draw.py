"""From a run folder or a table file to PNG files and ``summary.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ppdbench.core.errors import NothingUsableError, UsageError
from ppdbench.plots import style
from ppdbench.plots.microbench_figures import microbench_figures
from ppdbench.plots.run_figures import run_figures
from ppdbench.plots.summary import microbench_summary, run_summary, table_summary
from ppdbench.plots.table_figures import table_figures
from ppdbench.table.schema import load_table, to_document

MICROBENCH = "microbench.json"


def draw(source: Path, into: Path) -> dict[str, Any]:
    """Draw whatever ``source`` is into the folder ``into``; the summary is also written there.

    Raises:
        UsageError: ``source`` is neither a run folder nor a table file.
        TableError: a table that is damaged or of another version.
        NothingUsableError: a run that holds no point, or a micro-benchmark without a row.
    """
    summary, figures = _read(source)
    into.mkdir(parents=True, exist_ok=True)
    summary["source"] = source.name
    summary["figures"] = [style.save(figure, into / name).name for name, figure in figures]
    text = json.dumps(summary, indent=2, sort_keys=True, allow_nan=False)
    (into / "summary.json").write_text(text + "\n")
    return summary


def _read(source: Path) -> tuple[dict[str, Any], Iterable[tuple[str, Figure]]]:
    if (source / "points.jsonl").is_file():
        return _read_run(source)
    if (source / MICROBENCH).is_file():
        document = _json((source / MICROBENCH).read_text(), source / MICROBENCH)
        if not document.get("rows"):
            raise NothingUsableError(f"{source}: the run measured no row; run ppd microbench again")
        return microbench_summary(document), microbench_figures(document)
    if source.is_file():
        return _read_table(source)
    raise UsageError(
        f"{source}: neither a run folder (with points.jsonl or {MICROBENCH}) nor a table file; "
        "give what ppd sweep, ppd microbench or ppd build-table wrote with -o"
    )


def _read_run(folder: Path) -> tuple[dict[str, Any], Iterable[tuple[str, Figure]]]:
    lines = (folder / "points.jsonl").read_text().splitlines()
    points = [_json(line, folder / "points.jsonl") for line in lines if line.strip()]
    if not points:
        raise NothingUsableError(f"{folder}: the run holds no finished point; resume the sweep")
    manifest = _json((folder / "manifest.json").read_text(), folder / "manifest.json")
    return run_summary(points, manifest), run_figures(points, manifest)


def _read_table(path: Path) -> tuple[dict[str, Any], Iterable[tuple[str, Figure]]]:
    """A table that is damaged or of another version is not drawn either."""
    document = to_document(load_table(path))
    return table_summary(document), table_figures(document)


def _json(text: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON ({error}); a run or a table was expected") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a JSON object was expected, not {type(document).__name__}")
    return document
