"""The one piece of memory that all workers map: board, receipts, notes of conversations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from mmap import mmap
from pathlib import Path

import xxhash

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.core.errors import UsageError
from ppdbench.router.board import ArrivalRate, Board
from ppdbench.router.config import RouterConfig
from ppdbench.router.memory import Memory
from ppdbench.router.metrics import metric_names
from ppdbench.router.nodes import GAUGES, HEARING, board_names
from ppdbench.router.receipts import Receipts

LISTENER = 0
"""The worker that listens to KV events for all."""

CLOCK_OFFSET_S = "clock_offset_s"
_PAGE_BYTES = 4096
_STAMP_BYTES = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each part begins."""

    names: tuple[str, ...]
    workers: int
    buckets: int
    board_at: int
    receipts_at: int
    stamp_at: int
    size: int

    @classmethod
    def of(cls, config: RouterConfig) -> Layout:
        names = all_names(config.cluster)
        buckets = Memory.buckets_for(config.max_notes)
        board_at = _page_up(Memory.bytes_for(buckets))
        receipts_at = _page_up(board_at + Board.bytes_for(names, config.workers))
        stamp_at = receipts_at + Receipts.bytes_for(config.workers)
        size = _page_up(stamp_at + _STAMP_BYTES)
        return cls(names, config.workers, buckets, board_at, receipts_at, stamp_at, size)


def all_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """Everything on the board."""
    return (*metric_names(), *board_names(cluster), *ArrivalRate.NAMES, CLOCK_OFFSET_S)


def gauge_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """What a dead worker's row must not keep."""
    by_node = (f"{what}:{node.name}" for node in cluster.nodes for what in GAUGES)
    return ("in_flight", "drift_alarm", *by_node)


@dataclass(slots=True)
class Shared:
    """One worker's views of the memory; ``worker`` is its number."""

    worker: int
    board: Board
    memory: Memory
    receipts: Receipts

    @classmethod
    def over(cls, buffer: mmap, config: RouterConfig, worker: int) -> Shared:
        layout = Layout.of(config)
        return cls(
            worker,
            Board(buffer, layout.board_at, layout.names, config.workers, worker),
            Memory(buffer, 0, layout.buckets),
            Receipts(buffer, layout.receipts_at, config.workers, worker, config.decisions_log),
        )


def clock_offset_s(board: Board) -> float:
    """Makes wall time of monotonic time, as the first worker that asked found it.

    All have the same, also one that begins after the wall clock was set: they compare times.
    """
    offset_s = board.common(CLOCK_OFFSET_S)
    if offset_s.get() == 0.0:
        offset_s.put(time.time() - time.monotonic())
    return offset_s.get()


def clear_gauges(buffer: mmap, config: RouterConfig, worker: int) -> None:
    """Give back what a worker that died had taken."""
    layout = Layout.of(config)
    board = Board(buffer, layout.board_at, layout.names, config.workers, worker)
    _clear_gauges(board, config.cluster, worker)


def _clear_gauges(board: Board, cluster: ClusterSpec, worker: int) -> None:
    board.clear(gauge_names(cluster))
    if worker == LISTENER:
        for node in cluster.nodes:
            for what in HEARING:
                board.common(f"{what}:{node.name}").put(0.0)


def make_buffer(config: RouterConfig) -> mmap:
    """Memory that forked workers share; with ``state_file`` the notes outlive the router.

    Raises:
        UsageError: the state file cannot be used, or there is not as much memory.
    """
    layout = Layout.of(config)
    if config.state_file is None:
        try:
            return mmap(-1, layout.size)
        except (OSError, OverflowError, ValueError) as error:
            raise UsageError(
                f"no memory for {config.max_notes} notes and {config.workers} workers, "
                f"{layout.size} bytes; lower --max-notes or --workers"
            ) from error
    buffer = _mapped_file(config.state_file, layout, _stamp(config))
    sound = True
    for worker in range(config.workers):
        board = Board(buffer, layout.board_at, layout.names, config.workers, worker)
        _clear_gauges(board, config.cluster, worker)  # of a router that was killed
        ArrivalRate.forget(board)  # while it was away nobody counted
        board.common(CLOCK_OFFSET_S).put(0.0)
        sound = board.sound()
        board.close()
    # Notes have checksums; a node's number that is none would break every turn.
    if not sound:
        raise UsageError(f"state file {config.state_file} is damaged; remove it or name another")
    return buffer


@contextmanager
def state_locked(path: Path | None) -> Iterator[None]:
    """No other router uses the state file meanwhile; forked workers hold the lock as well.

    Raises:
        UsageError: one does, or there can be no such file.
    """
    if path is None:
        yield
        return
    try:
        file = path.open("ab")
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UsageError(
            f"state file {path} is in use by another router; stop that one or name another file"
        ) from error
    except OSError as error:
        raise UsageError(f"state file {path} cannot be used: {error.strerror}") from error
    with file:
        yield


def _mapped_file(path: Path, layout: Layout, stamp: bytes) -> mmap:
    at, size = layout.stamp_at, layout.size
    try:
        with path.open("a+b") as file:
            there = file.seek(0, 2)
            file.seek(at)
            if there and (there != size or file.read(_STAMP_BYTES) != stamp):
                raise UsageError(
                    f"state file {path} was written by a router with other nodes, workers or "
                    "--max-notes; remove it or name another"
                )
            file.truncate(size)
            buffer = mmap(file.fileno(), size)
    except OSError as error:
        raise UsageError(f"state file {path} cannot be used: {error.strerror}") from error
    buffer[at : at + _STAMP_BYTES] = stamp
    return buffer


def _stamp(config: RouterConfig) -> bytes:
    """Of all that must be as it was for numbers to mean what they meant: notes name nodes so."""
    nodes = [(node.name, node.role.value, node.url) for node in config.cluster.nodes]
    told = (nodes, Layout.of(config).names, config.workers, config.max_notes)
    return xxhash.xxh3_128_digest(repr(told).encode())


def _page_up(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
