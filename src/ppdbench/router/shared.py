"""The one piece of memory that all workers map: board, receipts, notes of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.core.errors import UsageError
from ppdbench.router.board import ArrivalRate, Board
from ppdbench.router.config import RouterConfig
from ppdbench.router.memory import Memory
from ppdbench.router.metrics import metric_names
from ppdbench.router.nodes import GAUGES, board_names
from ppdbench.router.receipts import Receipts

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each part begins. The notes come first, so that a state file holds just them."""

    names: tuple[str, ...]
    workers: int
    buckets: int
    board_at: int
    receipts_at: int
    size: int

    @classmethod
    def of(cls, config: RouterConfig) -> Layout:
        names = all_names(config.cluster)
        buckets = Memory.buckets_for(config.max_notes)
        board_at = _page_up(Memory.bytes_for(buckets))
        receipts_at = _page_up(board_at + Board.bytes_for(names, config.workers))
        size = _page_up(receipts_at + Receipts.bytes_for(config.workers))
        return cls(names, config.workers, buckets, board_at, receipts_at, size)


def all_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """Everything on the board."""
    return (*metric_names(), *board_names(cluster), *ArrivalRate.NAMES)


def gauge_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """What a dead worker's row must not keep."""
    return ("in_flight", *(f"{what}:{node.name}" for node in cluster.nodes for what in GAUGES))


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


def make_buffer(config: RouterConfig) -> mmap:
    """Memory that forked workers share; with ``state_file`` the notes outlive the router.

    Raises:
        UsageError: the state file cannot be used.
    """
    size = Layout.of(config).size
    if config.state_file is None:
        return mmap(-1, size)
    return _mapped_file(config.state_file, size)


def _mapped_file(path: Path, size: int) -> mmap:
    try:
        with path.open("a+b") as file:
            if file.seek(0, 2) not in (0, size):
                raise UsageError(
                    f"state file {path} was written by a router with other nodes, workers or "
                    "--max-notes; remove it or name another"
                )
            file.truncate(size)
            return mmap(file.fileno(), size)
    except OSError as error:
        raise UsageError(f"state file {path} cannot be used: {error.strerror}") from error


def _page_up(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
