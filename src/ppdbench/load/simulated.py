"""The event-heap driver: a point on simulated time, recorded like a point on the wall clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import floor, log, log1p

from ppdbench.core.conversation import Arrival, Conversation
from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.seeds import unit_interval
from ppdbench.core.topology import NodeSpec, Topology
from ppdbench.policy.base import Policy
from ppdbench.policy.placement import Placement, least_loaded
from ppdbench.policy.rules import decide
from ppdbench.runs.points import PointOutcome
from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.sim.cluster import Request, SimCluster
from ppdbench.sim.config import SimConfig
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.prepare import capacity_for, costs_for


def run_simulated_point(  # noqa: PLR0913, PLR0917 - a point is these six things
    topology: Topology,
    policy: Policy,
    arrivals: Sequence[Arrival],
    rate_per_s: float,
    config: SimConfig,
    seed: int,
) -> PointOutcome:
    """Serve ``arrivals`` to the last token on a fresh, cold cluster.

    The same arguments give the same records, whatever the hash seed. ``seed`` draws nothing but
    where re-tokenisation breaks a reply.
    """
    started = time.perf_counter()
    point = _Point(topology, policy, rate_per_s, config, seed)
    for arrival in arrivals:
        point.expect(arrival)
    point.kernel.run()
    wall_s = time.perf_counter() - started
    return PointOutcome(point.records, point.facts(arrivals), point.timing(wall_s))


class _Talk:
    """Where one conversation stands."""

    __slots__ = ("conversation", "history_tokens", "home", "matching_tokens", "prefill", "turn")

    def __init__(self, conversation: Conversation, home: NodeSpec) -> None:
        self.conversation = conversation
        self.home = home
        self.prefill: NodeSpec | None = None
        self.turn = 0
        self.history_tokens = conversation.context_tokens
        self.matching_tokens = 0


class _Point:
    def __init__(
        self, topology: Topology, policy: Policy, rate_per_s: float, config: SimConfig, seed: int
    ) -> None:
        self.kernel = Kernel()
        self.records: list[TurnRecord] = []
        self._policy, self._rate_per_s, self._seed = policy, rate_per_s, seed
        self._loss = config.retokenisation_loss
        self._capacity = capacity_for(config)
        self._cluster = SimCluster(topology, config, self.kernel, costs_for(config), self._capacity)
        self._placement = Placement(topology.homes)
        self._prefill_nodes = topology.prefill_nodes
        self._talks: dict[str, _Talk] = {}

    def expect(self, arrival: Arrival) -> None:
        self.kernel.at(arrival.at_s, self._begin, arrival.conversation)

    def facts(self, arrivals: Sequence[Arrival]) -> dict[str, object]:
        return {
            "send_lag_p99_s": 0.0,
            "loop_lag_p99_s": 0.0,
            "path_proven": True,
            "bytes_moved": sum(r.bytes_moved or 0 for r in self.records),
            "recomputed_tokens": sum(r.recomputed_tokens or 0 for r in self.records),
            "window_s": arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0,
        }

    def timing(self, wall_s: float) -> dict[str, object]:
        return {
            "wall_s": wall_s,
            "events": self.kernel.events,
            "engine_steps": sum(node.steps for node in self._cluster.nodes.values()),
            "preemptions": sum(node.preemptions for node in self._cluster.nodes.values()),
        }

    def _begin(self, conversation: Conversation) -> None:
        talk = _Talk(conversation, self._placement.home_of(conversation.id))
        self._talks[conversation.id] = talk
        self._next_turn(talk)

    def _next_turn(self, talk: _Talk) -> None:
        talk.turn += 1
        turn = talk.conversation.turns[talk.turn - 1]
        decision = self._decide(talk)
        prefill = None
        if decision.route in (Route.REMOTE, Route.PULL):
            prefill = self._prefill_node(talk).name
        record = self._open_record(talk, decision, prefill)
        self.records.append(record)
        request = Request(
            talk.conversation.id,
            decision.route,
            talk.home.name,
            talk.history_tokens + turn.new_tokens,
            turn.output_tokens,
            talk.matching_tokens,
            self._done,
            prefill,
            record,
        )
        self._cluster.submit(request)

    def _decide(self, talk: _Talk) -> Decision:
        turn = talk.conversation.turns[talk.turn - 1]
        features = Features(
            talk.turn,
            talk.history_tokens,
            turn.new_tokens,
            turn.output_tokens,
            self._rate_per_s,
            self._cluster.running(talk.home.name),
            f"{talk.conversation.id}/{talk.turn}",
        )
        return decide(self._policy, features, talk.home.role)

    def _prefill_node(self, talk: _Talk) -> NodeSpec:
        if talk.prefill is None:
            talk.prefill = least_loaded(self._prefill_nodes, self._cluster.outstanding_prefill)
        return talk.prefill

    def _open_record(self, talk: _Talk, decision: Decision, prefill: str | None) -> TurnRecord:
        turn, now = talk.conversation.turns[talk.turn - 1], self.kernel.now_s
        return TurnRecord(
            talk.conversation.id,
            talk.turn,
            decision.route,
            talk.home.name,
            now,
            now,
            prefill_node=prefill,
            context_tokens=talk.history_tokens,
            new_tokens=turn.new_tokens,
            wanted_output_tokens=turn.output_tokens,
            reason=decision.reason,
        )

    def _done(self, request: Request) -> None:
        record = request.record
        assert record is not None
        talk = self._talks[record.conversation]
        if request.error:
            record.outcome, record.error = Outcome.UPSTREAM_STATUS, request.error
        else:
            self._close_record(record, request)
            self._remember(talk, request)
        if request.error or talk.turn == len(talk.conversation.turns):
            self._end(talk)
        else:
            think_s = talk.conversation.turns[talk.turn].think_s
            self.kernel.at(self.kernel.now_s + think_s, self._next_turn, talk)

    def _close_record(self, record: TurnRecord, request: Request) -> None:
        record.first_token_at_s = request.first_token_at_s
        record.finished_at_s = request.finished_at_s
        record.prompt_tokens = request.prompt_tokens
        record.output_tokens = request.output_tokens
        record.cached_tokens = request.cached_tokens
        record.bytes_moved = request.moved_tokens * self._capacity.kv_bytes_per_token
        computed = request.prompt_tokens - request.cached_tokens
        record.recomputed_tokens = max(0, computed - record.new_tokens)

    def _remember(self, talk: _Talk, request: Request) -> None:
        """The next prompt repeats this one and as much of the reply as survives as text."""
        reply = request.output_tokens
        talk.history_tokens = request.prompt_tokens + reply
        talk.matching_tokens = request.prompt_tokens + min(reply, self._surviving(talk))

    def _surviving(self, talk: _Talk) -> int:
        """Reply tokens before the first that encodes differently: geometric, drawn by turn."""
        if self._loss <= 0:
            return 1 << 30
        if self._loss >= 1:
            return 0
        lot = unit_interval(f"{talk.conversation.id}/{talk.turn}/retokenised", self._seed)
        return floor(log(1 - lot) / log1p(-self._loss))

    def _end(self, talk: _Talk) -> None:
        self._placement.release(talk.conversation.id)
        del self._talks[talk.conversation.id]
