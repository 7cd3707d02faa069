"""A sweep's progress on stderr: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ppdbench.cli.output import say

if TYPE_CHECKING:
    from ppdbench.experiments.sweep import Progress

SECONDS_BETWEEN_LINES = 10.0


class Reporter(Protocol):
    """Told after each point."""

    def __call__(self, progress: Progress) -> None: ...


def counting_progress() -> Callable[[str, int], None]:
    """Lines about a source that is read for the first time."""
    began_s = said_s = time.monotonic()

    def report(source: str, count: int) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if count == 0:
            say(f"reading {source} and counting its tokens, once; what comes of it is kept")
        elif now_s - said_s > SECONDS_BETWEEN_LINES:
            said_s = now_s
            say(f"{source}: {count:,} conversations counted in {now_s - began_s:.0f} s")

    return report


@contextmanager
def sweep_progress() -> Iterator[Reporter]:
    """The reporter that fits where stderr goes."""
    if sys.stderr.isatty():
        with _bar() as reporter:
            yield reporter
    else:
        yield _Lines()


class _Running:
    """Figures so far, of this attempt."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._points = 0
        self._ok = 0
        self._codes: Counter[str] = Counter()

    def count(self, progress: Progress) -> None:
        from ppdbench.experiments.sweep import DEFAULT_VOTERS

        codes = progress.measured.validity
        self._points += 1
        self._ok += DEFAULT_VOTERS.issuperset(codes)
        self._codes.update(codes)

    def left_s(self, progress: Progress) -> float:
        elapsed_s = time.monotonic() - self.began_s
        return elapsed_s / self._points * (progress.total - progress.done)

    def text(self) -> str:
        codes = "".join(f", {count} {code}" for code, count in sorted(self._codes.items()))
        return f"{self._ok} ok{codes}"


class _Lines:
    """The first point, the last, and one line per :data:`SECONDS_BETWEEN_LINES` between."""

    def __init__(self) -> None:
        self._running = _Running()
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        self._running.count(progress)
        now_s = time.monotonic()
        if now_s < self._next_s and progress.done < progress.total:
            return
        self._next_s = now_s + SECONDS_BETWEEN_LINES
        left = f", about {self._running.left_s(progress):.0f} s left"
        say(
            f"sweep: {progress.done}/{progress.total} points, {self._running.text()}"
            + (f"{left}; {_latest(progress)}" if progress.done < progress.total else "")
        )


def _latest(progress: Progress) -> str:
    """The point that has just finished, with its medians."""
    measured = progress.measured
    if measured.ttft_s is None or measured.tpot_s is None:
        return measured.key.slug
    ttft, tpot = measured.ttft_s * 1000, measured.tpot_s * 1000
    return f"{measured.key.slug}: TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms"


@contextmanager
def _bar() -> Iterator[Reporter]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("sweep"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    running = _Running()
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def report(progress: Progress) -> None:
            running.count(progress)
            bar.update(
                task,
                completed=progress.done,
                total=progress.total,
                description=f"{running.text()} · {_latest(progress)}",
            )

        yield report
