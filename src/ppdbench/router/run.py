"""From a configuration to served requests: one worker here, or several that share the port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from mmap import mmap

import uvloop

from ppdbench.core.errors import EngineError, PpdError
from ppdbench.http.files import raise_file_limit
from ppdbench.policy.base import Policy
from ppdbench.router.config import RouterConfig
from ppdbench.router.policies import Tables, check_policy, load_policy
from ppdbench.router.shared import Shared, clear_gauges, make_buffer, state_locked
from ppdbench.router.worker import Router, serve_until_told

_TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
YOUNG_S = 2.0
PAUSE_S = 1.0
"""Before a worker that died younger than ``YOUNG_S`` is replaced."""

STUCK_S = 5.0
"""How much longer than its drain a worker may take to end before it is killed."""

_YEAR_S = 365 * 86400.0
"""A drain without an end is no time that a timer could be set to."""

_LAST = b"\1"
"""The ticket of the last worker to listen."""

log = logging.getLogger("ppdbench.router")


def run(config: RouterConfig, ready: Callable[[str], None]) -> None:
    """Serve until told to stop. ``ready`` gets the URL once the port is open.

    Raises:
        UsageError: options that do not fit together.
        EngineError: the port is taken.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a table to take anew
    tables = Tables(config)
    policy = load_policy(config)
    shadow = tables.shadow()
    for warning in asyncio.run(check_policy(policy if shadow is None else shadow, config)):
        log.warning("%s", warning)
    raise_file_limit()
    if config.decisions_log is not None:
        config.decisions_log.open("ab").close()  # later no turn fails for it, nor a worker
    with state_locked(config.state_file):
        buffer = make_buffer(config)
        if config.workers == 1:
            _work(config, policy, tables, buffer, 0, ready)
        else:
            _Crew(config, policy, tables, buffer, ready).work()


def _work(  # noqa: PLR0913, PLR0917  (what a worker is made of)
    config: RouterConfig,
    policy: Policy,
    tables: Tables,
    buffer: mmap,
    worker: int,
    ready: Callable[[str], None],
    parent: int | None = None,
) -> None:
    async def serve() -> None:
        router = Router(config, policy, Shared.over(buffer, config, worker), tables)
        await serve_until_told(router, ready, parent)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class _Crew:
    """The parent of several workers: forks them, passes signals on, replaces one that dies.

    They share the port by ``SO_REUSEPORT`` and the memory by inheritance. A worker that dies
    before the port was open ends all with its exit code. Each holds the reading end of a pipe that
    the parent alone can write to, so even a parent that is killed does not leave them behind.
    """

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        tables: Tables,
        buffer: mmap,
        ready: Callable[[str], None],
    ) -> None:
        self._config = config
        self._policy = policy
        self._tables = tables
        self._buffer = buffer
        self._ready = ready
        self._pids: dict[int, int] = {}
        self._begun_s: dict[int, float] = {}
        self._life_end, self._life = os.pipe()
        self._tickets = _pipe_with(b"\0" * (config.workers - 1) + _LAST)
        self._stopping = False

    def work(self) -> None:
        """Run until all workers have ended."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._pass_on)
        signal.signal(signal.SIGALRM, self._kill)
        self._check_port()
        for worker in range(self._config.workers):
            self._fork(worker)
        while self._pids:
            pid, status = os.wait()
            worker = self._pids.pop(pid, -1)
            if worker >= 0 and not self._stopping:
                self._replace(worker, os.waitstatus_to_exitcode(status))
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _check_port(self) -> None:
        """Workers would share the port with another router's too, and each get half the turns."""
        host = self._config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, self._config.port), family=family).close()
        except OSError as error:
            raise self._no_port() from error

    def _no_port(self) -> EngineError:
        return EngineError(
            f"cannot listen on {self._config.host}:{self._config.port}; choose another --port"
        )

    def _replace(self, worker: int, code: int) -> None:
        if code == EngineError.exit_code:
            self._stop()
            raise self._no_port()
        log.error("worker %d ended with %d; another takes its place", worker, code)
        clear_gauges(self._buffer, self._config, worker)
        if time.monotonic() - self._begun_s[worker] < YOUNG_S:
            time.sleep(PAUSE_S)  # it could not begin, and nor can the next one just now
        self._fork(worker)

    def _fork(self, worker: int) -> None:
        """Begin a worker unless told to stop; who is told meanwhile tells this worker too."""
        with _signals_held():
            if self._stopping:
                return
            pid = os.fork()
            if pid:
                self._pids[pid] = worker
                self._begun_s[worker] = time.monotonic()
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        code = 1
        try:
            os.close(self._life)
            _work(
                self._config, self._policy, self._tables, self._buffer, worker, self._listens,
                self._life_end,
            )  # fmt: skip
            code = 0
        except PpdError as error:
            log.error("worker %d: %s", worker, error)  # noqa: TRY400  (a sentence, no trace)
            code = error.exit_code
        except Exception:
            log.exception("worker %d failed", worker)
        finally:
            os._exit(code)

    def _listens(self, url: str) -> None:
        """Called in a worker whose port is open: the last one to come says so for all."""
        if os.read(self._tickets, 1) == _LAST:
            self._ready(url)

    def _stop(self, *_: object) -> None:
        if not self._stopping:
            self._stopping = True
            signal.setitimer(signal.ITIMER_REAL, min(self._config.drain_s, _YEAR_S) + STUCK_S)
        self._pass_on(signal.SIGTERM)

    def _kill(self, *_: object) -> None:
        """End workers that did not: one that is stopped or stuck would keep us for ever."""
        if not self._stopping:
            return
        numbers = ", ".join(map(str, sorted(self._pids.values())))
        log.error("killed for not ending in time: worker %s", numbers)
        self._pass_on(signal.SIGKILL)

    def _pass_on(self, number: int, *_: object) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):  # one whose end is just being noted
                os.kill(pid, number)


def _pipe_with(content: bytes) -> int:
    """The reading end of a pipe that holds ``content`` and then ends."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading


@contextmanager
def _signals_held() -> Iterator[None]:
    """What is signalled meanwhile is heard at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD_BY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
