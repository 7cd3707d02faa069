"""Processes that we started, known by pid *and* start time, so that no stranger is ever ended."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ppdbench.core.errors import EngineError

_TRACKER = "resource_tracker"
"""Python's helper that unlinks shared memory once its users are gone; it must outlive them."""

_ORPHAN_GRACE_S = 1.0
_PORT_RANGE = (20000, 32000)


@dataclass(frozen=True, slots=True)
class Started:
    """The leader of a session. ``start_ticks`` is the kernel's clock at its start, since boot.

    Wall-clock start times move when the clock is set; these do not.
    """

    pid: int
    start_ticks: int

    def alive(self) -> bool:
        """Whether this very process still runs; a later owner of its pid does not count."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """The process itself, ``None`` when it has ended."""
        if start_ticks(self.pid) != self.start_ticks or _is_zombie(self.pid):
            return None
        try:
            return psutil.Process(self.pid)
        except psutil.Error:
            return None


def start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; ``None`` when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def boot_id() -> str:
    """Changes with every boot, so that pids and ticks of an earlier one are known as such."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start(
    argv: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start ``argv`` as leader of its own session, output to ``log``.

    Raises:
        EngineError: the program cannot be started.
    """
    try:
        with log.open("wb") as out:
            return subprocess.Popen(  # noqa: S603  (our own argv, no shell)
                list(argv),
                env=_joined(os.environ, environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise EngineError(
            f"cannot start {argv[0]!r}: {error.strerror}; "
            "run scripts/engine, or name the engine's python with --vllm"
        ) from error


def _joined(own: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """``added`` wins, but search paths of ours must not hide the caller's."""
    joined = {
        name: os.pathsep.join(paths)
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH")
        if (paths := [env[name] for env in (added, own) if env.get(name)])
    }
    return {**own, **added, **joined}


def started(pid: int) -> Started:
    """Identify a process that certainly exists: a child not yet waited for."""
    ticks = start_ticks(pid)
    assert ticks is not None
    return Started(pid, ticks)


def stop(leaders: Iterable[Started], grace_s: float) -> None:
    """End each leader with everything it started: SIGTERM, ``grace_s`` to comply, SIGKILL.

    Returns when all of them are gone. A leader that is no longer itself is left alone, but
    members of its session are still ended: they are the engine's children.
    """
    families = [_family(leader) for leader in leaders]
    heads = [process for family in families for process in family[:1]]
    everyone = [process for family in families for process in family]
    workers = [process for process in everyone if not _is_tracker(process)]
    for number, whom, limit_s in (
        (signal.SIGTERM, heads, grace_s),  # an engine ends its own children best
        (signal.SIGTERM, workers, _ORPHAN_GRACE_S),
        (signal.SIGKILL, workers, _ORPHAN_GRACE_S),
    ):
        _signal(whom, number)
        _wait(whom, limit_s)
    _wait(everyone, _ORPHAN_GRACE_S)
    _signal(everyone, signal.SIGKILL)
    _wait(everyone, 5.0)


def _family(leader: Started) -> list[psutil.Process]:
    """The leader first, then the rest of its session. Sessions are named by the leader's pid."""
    rest = [p for p in psutil.process_iter() if p.pid != leader.pid and _session(p) == leader.pid]
    own = leader.process()
    if own is None and psutil.pid_exists(leader.pid) and not _is_zombie(leader.pid):
        return []  # the pid has another owner now, and so may the session
    known = {p.pid for p in rest}
    children = [] if own is None else [p for p in _children(own) if p.pid not in known]
    return [*([] if own is None else [own]), *rest, *children]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in part for part in process.cmdline())
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # psutil checks the start time before it signals
            process.send_signal(number)


def _wait(processes: Iterable[psutil.Process], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    left = list(processes)
    while left and time.monotonic() < deadline:
        left = [p for p in left if p.is_running() and not _is_zombie(p.pid)]
        time.sleep(0.05 if left else 0)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on now, below the range that outgoing connections are given.

    All are held until all are found, so none repeats.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(range(*_PORT_RANGE), _PORT_RANGE[1] - _PORT_RANGE[0]):
            if len(found) == count:
                break
            if _bound(held.enter_context(socket.socket()), host, port):
                found.append(port)
    if len(found) < count:
        raise EngineError(
            f"only {len(found)} of {count} free ports in {_PORT_RANGE}; stop a server"
        )
    return found


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return _bound(probe, host, port)


def _bound(probe: socket.socket, host: str, port: int) -> bool:
    """As servers bind: connections that have just closed do not count as taken."""
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError:
        return False
    return True
