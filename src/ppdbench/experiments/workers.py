"""Pure tasks over the cores, by processes that never outlive the one that asked.

A worker holds one end of a pipe whose other end dies with the parent; on Linux the kernel also
kills it at that moment. It writes nothing but its answers into the pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

from ppdbench.core.errors import EngineError
from ppdbench.load.lifetime import die_with

Q = TypeVar("Q")
A = TypeVar("A")


def available_cores() -> int:
    """Cores this process may use, which is not always the machine's."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def in_parallel(task: Callable[[Q], A], questions: Sequence[Q], workers: int) -> Iterator[A]:
    """``task`` of each question, in the order in which they finish.

    The task must be picklable; each worker gets its own copy once. With one worker or one
    question everything happens in this process. What a task raises is raised here.

    Raises:
        EngineError: a worker died, for instance for want of memory.
    """
    workers = min(workers, len(questions))
    if workers < 2:
        for question in questions:
            yield task(question)  # not map(): a task's StopIteration would look like the end
        return
    pool = _Pool(task, workers)
    try:
        yield from pool.answers(questions)
    finally:
        pool.stop()


class _Pool(Generic[Q, A]):
    def __init__(self, task: Callable[[Q], A], workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: dict[Connection, SpawnProcess] = {}
        for _ in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(task, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._workers[mine] = process

    def answers(self, questions: Sequence[Q]) -> Iterator[A]:
        waiting = iter(questions)
        busy = {pipe for pipe in self._workers if self._ask(pipe, waiting)}
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                answer = self._answer(ready)
                if not self._ask(ready, waiting):
                    busy.discard(ready)
                yield answer

    def _ask(self, pipe: Connection, waiting: Iterator[Q]) -> bool:
        """Give the worker its next question; false when there is none left."""
        for question in waiting:
            pipe.send((question,))
            return True
        return False

    def _answer(self, pipe: Connection) -> A:
        try:
            answer, error = pipe.recv()
        except (EOFError, OSError) as cause:
            process = self._workers[pipe]
            process.join(timeout=5)
            raise EngineError(
                f"a worker process died (exit code {process.exitcode}; −9 is often want of "
                "memory); continue with --resume, with fewer --jobs"
            ) from cause
        if error is not None:
            raise error
        result: A = answer
        return result

    def stop(self) -> None:
        for pipe, process in self._workers.items():
            pipe.close()
            process.kill()
        for process in self._workers.values():
            process.join()


def _serve(task: Callable[[Q], A], pipe: Connection, parent: int) -> None:
    """A worker's life."""
    die_with(parent)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            (question,) = pipe.recv()
            pipe.send(_attempt(task, question))


def _attempt(task: Callable[[Q], A], question: Q) -> tuple[A | None, Exception | None]:
    try:
        return task(question), None
    except Exception as error:  # noqa: BLE001 (raised again where it was asked for)
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return None, error
