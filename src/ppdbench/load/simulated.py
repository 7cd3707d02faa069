"""The event-heap driver: a point on simulated time, recorded like a point on the wall clock."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import floor, log, log1p
from pathlib import Path

from ppdbench.core.conversation import Arrival
from ppdbench.core.decision import Route
from ppdbench.core.seeds import unit_interval
from ppdbench.core.topology import Topology
from ppdbench.load.conversation import Dialogue, Play
from ppdbench.policy.base import Policy
from ppdbench.runs.points import PointOutcome
from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.sim.cluster import Request, SimCluster
from ppdbench.sim.config import SimConfig
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.prepare import capacity_for, costs_for
from ppdbench.sim.step_log import Span, token_times_s
from ppdbench.sim.trace import write_trace

ALL = 1 << 62


def run_simulated_point(  # noqa: PLR0913, PLR0917 - a point is these six things
    topology: Topology,
    policy: Policy,
    arrivals: Sequence[Arrival],
    rate_per_s: float,
    config: SimConfig,
    seed: int,
    *,
    users: int | None = None,
    make_play: Callable[..., Play] = Play,
    connections: int | None = None,
    trace: Path | None = None,
) -> PointOutcome:
    """Serve ``arrivals`` to the last token on a fresh, cold cluster.

    The same arguments give the same records, whatever the hash seed. ``seed`` draws nothing but
    where re-tokenisation breaks a reply. ``users`` makes it a closed loop: so many conversations
    run at a time, each begins when one before it has ended. ``make_play`` and ``connections``
    emulate other people's placement and a client that caps its connections.
    """
    started = time.perf_counter()
    kernel = Kernel()
    keep_steps = config.token_times or trace is not None
    cluster = SimCluster(
        topology,
        config,
        kernel,
        costs_for(config),
        capacity_for(config),
        keep_steps=keep_steps,
    )
    play = make_play(
        topology,
        policy,
        rate_per_s,
        running=cluster.running,
        outstanding=cluster.outstanding_prefill.__getitem__,
    )
    at_once = len(arrivals) if users is None else users
    driver = _Driver(kernel, cluster, play, seed, connections)
    driver.later.extend(arrivals[at_once:])
    driver.expect(iter(sorted(arrivals[:at_once], key=_by_time)))
    with _no_collection():
        kernel.run()
    assert not driver.under_way, "turns wait for one another; they would count as good ones"
    if config.token_times:
        driver.add_token_times()
    if trace is not None:
        write_trace(trace, cluster, play.records)
    timing = _timing(kernel, cluster, time.perf_counter() - started)
    return PointOutcome(play.records, _facts(play.records), timing)


def _by_time(arrival: Arrival) -> float:
    return arrival.at_s


@contextmanager
def _no_collection() -> Iterator[None]:
    """No search for cycles meanwhile: it would walk all records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Driver:
    """Carries turns from the conversations to the cluster and back, on simulated time."""

    def __init__(
        self,
        kernel: Kernel,
        cluster: SimCluster,
        play: Play,
        seed: int,
        connections: int | None,
    ) -> None:
        self._kernel, self._cluster, self._play = kernel, cluster, play
        self._seed = seed
        self._loss = cluster.config.retokenisation_loss
        self._free_connections = ALL if connections is None else connections
        self._queue: deque[Dialogue] = deque()
        self.later: deque[Arrival] = deque()
        self._matching: dict[str, int] = {}
        self._out: dict[str, tuple[Dialogue, TurnRecord]] = {}
        self._spans: list[tuple[TurnRecord, list[Span]]] = []

    @property
    def under_way(self) -> int:
        """Turns that have been sent and have not ended."""
        return len(self._out)

    def expect(self, arrivals: Iterator[Arrival]) -> None:
        """One arrival at a time stands in the event heap, however many there are."""
        arrival = next(arrivals, None)
        if arrival is not None:
            self._kernel.at(arrival.at_s, self._arrive, (arrival, arrivals))

    def _arrive(self, due: tuple[Arrival, Iterator[Arrival]]) -> None:
        arrival, later = due
        self.expect(later)
        self.begin(arrival)

    def begin(self, arrival: Arrival) -> None:
        """A conversation arrives; it may have to wait for a connection."""
        dialogue = self._play.begin(arrival.conversation, self._kernel.now_s)
        if self._free_connections:
            self._free_connections -= 1
            self._send(dialogue)
        else:
            self._queue.append(dialogue)

    def add_token_times(self) -> None:
        """After the run: the instants of every good turn's tokens."""
        ends_s = {
            name: node.log.ends_s()
            for name, node in self._cluster.nodes.items()
            if node.log is not None
        }
        for record, spans in self._spans:
            record.token_at_s = token_times_s(ends_s[record.node], spans)

    def _send(self, dialogue: Dialogue) -> None:
        record = self._play.send(dialogue, self._kernel.now_s)
        if record.route is Route.PULL and not self._cluster.config.hand_off.can_pull:
            record.route, record.reason = Route.REMOTE, "no_pull,connector"
        name = dialogue.conversation.id
        self._out[name] = dialogue, record
        request = Request(
            name,
            record.route,
            record.node,
            record.context_tokens + record.new_tokens,
            record.wanted_output_tokens,
            self._matching.get(name, 0),
            self._done,
            record.prefill_node,
        )
        self._cluster.submit(request)

    def _done(self, request: Request) -> None:
        dialogue, record = self._out.pop(request.conversation)
        if request.error:
            record.outcome, record.error = Outcome.UPSTREAM_STATUS, request.error
        else:
            self._close_record(record, request)
            self._spans.append((record, request.spans))
            survivors = self._surviving(f"{request.conversation}/{record.turn}")
            kept = min(request.output_tokens, survivors)
            self._matching[request.conversation] = request.prompt_tokens + kept
        next_at_s = self._play.close(dialogue, record)
        if next_at_s is not None:
            self._kernel.at(next_at_s, self._send, dialogue)
            return
        self._matching.pop(request.conversation, None)
        if self._queue:
            self._send(self._queue.popleft())
        else:
            self._free_connections += 1
        if self.later:
            self.begin(self.later.popleft())

    def _close_record(self, record: TurnRecord, request: Request) -> None:
        record.first_token_at_s = request.first_token_at_s
        record.finished_at_s = request.finished_at_s
        record.prompt_tokens = request.prompt_tokens
        record.output_tokens = request.output_tokens
        record.cached_tokens = request.cached_tokens
        record.bytes_moved = request.moved_tokens * self._cluster.capacity.kv_bytes_per_token
        computed = request.prompt_tokens - request.cached_tokens
        record.recomputed_tokens = max(0, computed - record.new_tokens)

    def _surviving(self, key: str) -> int:
        """Reply tokens before the first that encodes differently: geometric, drawn by turn."""
        if self._loss <= 0:
            return ALL
        if self._loss >= 1:
            return 0
        lot = unit_interval(f"{key}/retokenised", self._seed)
        return floor(log(1 - lot) / log1p(-self._loss))


def _facts(records: Sequence[TurnRecord]) -> dict[str, object]:
    begun = [record.scheduled_at_s for record in records if record.turn == 1]
    return {
        "send_lag_p99_s": 0.0,
        "loop_lag_p99_s": 0.0,
        "path_proven": True,
        "bytes_moved": sum(record.bytes_moved or 0 for record in records),
        "recomputed_tokens": sum(record.recomputed_tokens or 0 for record in records),
        "window_s": max(begun, default=0.0) - min(begun, default=0.0),
    }


def _timing(kernel: Kernel, cluster: SimCluster, wall_s: float) -> dict[str, object]:
    nodes = cluster.nodes.values()
    return {
        "wall_s": wall_s,
        "events": kernel.events,
        "engine_steps": sum(node.steps for node in nodes),
        "preemptions": sum(node.preemptions for node in nodes),
    }
