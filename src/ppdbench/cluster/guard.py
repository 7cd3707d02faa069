"""A process that starts nodes for a sweep and ends them when the sweep ends, however it ends.

The owner holds the other end of a pipe. When the pipe closes, or the owner is no longer the
parent (kill -9, with the pipe kept open by a forked worker), everything that was started is
stopped. ``detach`` lets the nodes live on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppdbench.cluster.processes import Started, start, started, stop
from ppdbench.cluster.vllm_args import NodeCommand
from ppdbench.core.errors import EngineError

GRACE_S = 8.0
_OWNER_CHECK_S = 0.5


class Guard:
    """The owner's handle. Methods may be called from several threads.

    ``niceness`` is the nodes': engines that share their cores with the load client must not hold
    its clock up.

    Raises (every method):
        EngineError: the guard is gone.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._lock = threading.Lock()
        lower = ["nice", "-n", str(niceness)] if niceness else []
        self._process = subprocess.Popen(  # noqa: S603
            [*lower, sys.executable, "-m", "ppdbench.cluster.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __repr__(self) -> str:
        return f"<Guard pid {self._process.pid}>"

    def start(self, command: NodeCommand, log: Path) -> Started:
        """Start a node under guard."""
        answer = self._ask(
            do="start", argv=command.argv, environment=dict(command.environment), log=str(log)
        )
        return Started(answer["pid"], answer["start_ticks"])

    def exit_code(self, node: Started) -> int | None:
        """``None`` while it runs; negative for a signal."""
        code: int | None = self._ask(do="exit_code", pid=node.pid)["code"]
        return code

    def stop(self, nodes: list[Started], grace_s: float = GRACE_S) -> None:
        """End these nodes with all they started; returns when they are gone.

        Does so itself when the guard has been killed.
        """
        try:
            self._ask(do="stop", pids=[node.pid for node in nodes], grace_s=grace_s)
        except EngineError:
            stop(nodes, grace_s)

    def detach(self) -> None:
        """The nodes live on without guard or owner."""
        self._ask(do="detach")
        self._process.wait(timeout=5)

    def close(self) -> None:
        """End all that still runs; returns when it is gone. Harmless after :meth:`detach`."""
        with self._lock:
            if self._process.stdin is not None:
                # What a killed guard never read is flushed here, into nothing.
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _ask(self, **message: Any) -> dict[str, Any]:  # noqa: ANN401  (JSON)
        with self._lock:
            try:
                assert self._process.stdin is not None
                assert self._process.stdout is not None
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except (BrokenPipeError, ValueError) as error:
                raise EngineError("the process that holds the nodes is gone") from error
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the node guard died"}
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


class _Holder:
    """The guard's own side: what it started, by pid."""

    def __init__(self) -> None:
        self._popens: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, Started] = {}

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["do"] == "start":
            return self._start(message)
        if message["do"] == "exit_code":
            return {"code": self._popens[message["pid"]].poll()}
        self.stop(message["pids"], message["grace_s"])
        return {}

    def _start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            child = start(message["argv"], message["environment"], Path(message["log"]))
        except EngineError as error:
            return {"error": str(error)}
        self._popens[child.pid] = child
        self._started[child.pid] = started(child.pid)
        return {"pid": child.pid, "start_ticks": self._started[child.pid].start_ticks}

    def stop(self, pids: list[int], grace_s: float) -> None:
        stop([self._started.pop(pid) for pid in pids if pid in self._started], grace_s)
        for pid in pids:
            if pid in self._popens:
                self._popens[pid].wait()

    def stop_all(self) -> None:
        self.stop(list(self._started), GRACE_S)


def serve() -> None:
    """Answer the owner until it says detach or goes."""
    holder, owner = _Holder(), os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while (line := _next_line(owner)) is not None:
            message = json.loads(line)
            if message["do"] == "detach":
                holder = _Holder()
                print("{}", flush=True)  # noqa: T201  (the protocol's answer)
                return
            print(json.dumps(holder.answer(message)), flush=True)  # noqa: T201
    finally:
        holder.stop_all()


def _next_line(owner: int) -> str | None:
    """The next message; ``None`` once the owner is gone. Messages are whole lines."""
    while os.getppid() == owner:
        if select.select([sys.stdin], [], [], _OWNER_CHECK_S)[0]:
            return sys.stdin.readline() or None
    return None


if __name__ == "__main__":
    serve()
