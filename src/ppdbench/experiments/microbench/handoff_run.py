"""Runs the hand-off experiment: each way is a point of its own, on cold caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.core.decision import Route
from ppdbench.core.errors import UsageError
from ppdbench.core.seeds import seed_for
from ppdbench.core.topology import Role, Topology
from ppdbench.experiments.microbench.handoff import (
    LOCAL,
    ONE_NODE,
    REMOTE,
    WAYS,
    HandoffPlan,
    Hop,
    Prompt,
    fit_hop,
    hop_finding,
    hop_rows,
    pair_up,
    read_hops,
)
from ppdbench.experiments.microbench.plan import Limits
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.simulated import run_simulated_point
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.base import Policy
from ppdbench.policy.fixed import AlwaysPolicy, RolesPolicy
from ppdbench.runs.points import PointOutcome
from ppdbench.runs.records import TurnRecord
from ppdbench.sim.config import SimConfig
from ppdbench.sim.prepare import capacity_for


@dataclass(frozen=True, slots=True)
class Pair:
    """A P and a D that answer. ``delta``: their connector moves only the blocks that D lacks."""

    spec: ClusterSpec
    model: str
    limits: Limits
    delta: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """One point of the experiment."""

    way: str
    streams: int
    repeat: int


@dataclass(slots=True)
class Handoff:
    """What was measured. ``delta``: the connector moves only what D lacks."""

    plan: HandoffPlan
    prompts: list[Prompt]
    block_tokens: int
    delta: bool
    hops: list[Hop] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)
    unproven_points: int = 0
    failed_turns: int = 0
    left_out: int = 0
    moved_bytes: int = 0
    moved_block_tokens: int = 0

    def places(self) -> Iterator[Place]:
        """Ways stand side by side in each repeat, so that slow drift meets them all."""
        for repeat, streams, way in product(range(self.plan.repeats), self.plan.load_streams, WAYS):
            yield Place(way, streams, repeat)

    def take(self, place: Place, outcome: PointOutcome, *, keep: bool) -> None:
        """Read one point; one whose path is refuted does not count."""
        if outcome.facts.get("path_proven") is False:
            self.unproven_points += 1
            return
        self.failed_turns += sum(not record.ok for record in outcome.records)
        self.hops += read_hops(outcome.records, place.way, place.streams, place.repeat)
        if place.way == REMOTE and place.streams == 0:
            self._count_bytes(outcome)
        if keep:
            self.records += [_named(record, place) for record in outcome.records]

    def _count_bytes(self, outcome: PointOutcome) -> None:
        moved = outcome.facts.get("bytes_moved")
        if moved:
            self.moved_bytes += moved
            self.moved_block_tokens += sum(map(self._moved_by, self.prompts))

    def _moved_by(self, prompt: Prompt) -> int:
        """Tokens of whole blocks that a conversation moves, its first turn included."""
        again = 0 if self.delta else prompt.cached
        return again + -(-prompt.tokens // self.block_tokens) * self.block_tokens

    @property
    def bytes_per_token(self) -> float | None:
        """KV bytes of a token, from the bytes that the connector counted."""
        return self.moved_bytes / self.moved_block_tokens if self.moved_block_tokens else None

    def document(self) -> dict[str, Any]:
        """Rows, the fit per load, and the finding, as JSON."""
        fits = {
            str(streams): fit_hop(
                pair_up(self.hops, streams, delta=self.delta),
                self.bytes_per_token,
                seed_for(self.plan.seed, "fit", streams),
            )
            for streams in self.plan.load_streams
        }
        return {
            "rows": hop_rows(self.hops),
            "fits": fits,
            "finding": hop_finding(fits),
            "unproven_points": self.unproven_points,
            "failed_turns": self.failed_turns,
            "left_out_points": self.left_out,
        }


def _named(record: TurnRecord, place: Place) -> TurnRecord:
    name = f"{place.way}/{place.streams}/{place.repeat}/{record.conversation}"
    return replace(record, conversation=name)


def _policy(way: str) -> Policy:
    routes = {LOCAL: AlwaysPolicy(Route.LOCAL), REMOTE: AlwaysPolicy(Route.REMOTE)}
    return routes.get(way) or RolesPolicy()


def simulate_handoff(plan: HandoffPlan, config: SimConfig, *, keep_records: bool) -> Handoff:
    """On simulated time, 1P_1D and one R."""
    context = capacity_for(config).context_tokens
    prompts = plan.prompts(config.block_tokens, context)
    found = Handoff(plan, prompts, config.block_tokens, delta=not config.hand_off.synchronous)
    for place in found.places():
        outcome = run_simulated_point(
            Topology.parse("1R" if place.way == ONE_NODE else "1P_1D"),
            _policy(place.way),
            plan.arrivals(prompts, place.repeat, place.streams),
            1.0,
            config,
            seed_for(plan.seed, place.repeat),
        )
        found.take(place, outcome, keep=keep_records)
    return found


async def measure_handoff(
    plan: HandoffPlan,
    pair: Pair,
    tell: Callable[[str], None],
    is_over: Callable[[], bool] = bool,
) -> Handoff:
    """On real nodes: the D of a P→D pair serves all three ways, so that it is one machine.

    Once ``is_over()`` the remaining points are left.
    """
    both, alone = split_pair(pair.spec)
    block_tokens = pair.limits.block_tokens or 1
    prompts = plan.prompts(block_tokens, pair.limits.context_tokens)
    found = Handoff(plan, prompts, block_tokens, pair.delta)
    settings = LiveSettings(TurnSettings(pair.model), warm_up=plan.warm_up(prompts))
    places = list(found.places())
    for number, place in enumerate(places, 1):
        tell(f"point {number} of {len(places)}: {place.way}, {place.streams} decodes beside it")
        outcome = await run_live_point(
            alone if place.way == ONE_NODE else both,
            _policy(place.way),
            plan.arrivals(prompts, place.repeat, place.streams),
            1.0,
            settings,
            seed_for(plan.seed, place.repeat),
        )
        found.take(place, outcome, keep=True)
        if is_over():
            found.left_out = len(places) - number
            tell(f"time is over: {found.left_out} points are left out")
            break
    return found


def split_pair(spec: ClusterSpec) -> tuple[ClusterSpec, ClusterSpec]:
    """The first P and D of a cluster, and that D as if it were a replica.

    Raises:
        UsageError: there is no P or no D.
    """
    p = next((node for node in spec.nodes if node.role is Role.P), None)
    d = next((node for node in spec.nodes if node.role in (Role.D, Role.PD)), None)
    if p is None or d is None:
        raise UsageError(
            f"the hand-off needs a P and a D and the cluster is {spec.topology}; "
            "attach both, as in --node P=URL --node D=URL"
        )
    return ClusterSpec((p, d)), ClusterSpec((replace(d, name="r0", role=Role.R),))
