"""What processes hold of the machine, seen from outside."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import psutil


def members(leader_pids):
    """Every process in the sessions that these pids lead."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) in leader_pids:
                found.append(process)
    return found


def runs(process):
    """A zombie that init has not collected yet does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def memory_gib(processes):
    """Proportional: shared pages count once."""
    return sum(process.memory_full_info().pss for process in processes) / 2**30


def cores_used(processes, over_s):
    """How many cores they keep busy, on average over the next ``over_s``."""
    before = _cpu_s(processes)
    time.sleep(over_s)
    return (_cpu_s(processes) - before) / over_s


def _cpu_s(processes):
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def shared_memory(processes):
    """Files under /dev/shm that they have mapped."""
    files = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            files |= set(re.findall(r"(/dev/shm/[^\s(]+)", maps))
    return {Path(name) for name in files if Path(name).exists()}


def ports(processes):
    """TCP ports that they listen on."""
    return {port for process in processes for port in _listening(process.net_connections("tcp"))}


def all_ports():
    """TCP ports that anybody listens on."""
    return _listening(psutil.net_connections("tcp"))


def _listening(connections):
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
