"""Points on real engines: one cluster at a time, every node watched, every path proven."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import uvloop

from ppdbench.cluster.canary import check_canaries
from ppdbench.cluster.launch import Cluster
from ppdbench.cluster.link import SlowLink, measure_link
from ppdbench.core.conversation import Arrival, Conversation
from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError
from ppdbench.core.seeds import seed_for
from ppdbench.core.topology import Topology
from ppdbench.experiments.clusters import ClusterSource, cast, shape_of
from ppdbench.experiments.measuring import Measured, Measuring
from ppdbench.experiments.policies import policy_of
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.turns import TurnSettings
from ppdbench.runs.manifest import EngineIdentity
from ppdbench.runs.points import PointKey, PointOutcome

ATTEMPTS = 2
TOKEN_S = 0.02
"""A guess at the time per output token under load, for the forecast alone."""
WARM_UP_TURNS = 2


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How live points are run.

    ``warm_up`` conversations go before each point, ``None`` for one per home. ``canaries`` sends
    small greedy conversations over every path of a fresh cluster, and over one after each point,
    and compares the answers. ``emulated_gb_per_s`` slows hand-offs down to that rate,
    ``max_hand_offs`` bounds those that are out at once per P.
    """

    point_timeout_s: float = 900.0
    warm_up: int | None = None
    canaries: bool = True
    emulated_gb_per_s: float | None = None
    max_hand_offs: int | None = None
    vocabulary: int = 4000


@dataclass(frozen=True, slots=True)
class LiveBackend:
    """Points grouped by the processes they need, in an order within each that the seed draws.

    ``served_tokenizer`` is the served model's folder, if its tokenizer is at hand.
    """

    measuring: Measuring
    source: ClusterSource
    options: LiveOptions = field(default_factory=LiveOptions)
    say: Callable[[str], None] = lambda _: None
    served_tokenizer: str | None = None

    def identity(self) -> EngineIdentity:
        """The engine, which replies stand in the history, and whether the link is emulated."""
        found = self.source.identity(list(_by_shape(self.measuring.grid.points())))
        identity = replace(found, flags={**found.flags, **self._flags()})
        if self.options.emulated_gb_per_s is None:
            return identity
        name = f"{identity.connector}, emulated {self.options.emulated_gb_per_s:g} GB/s"
        return replace(identity, connector=name)

    def _flags(self) -> dict[str, str | int]:
        options = self.options
        flags: dict[str, str | int] = {"replies": self.measuring.grid.engine.replies}
        if options.max_hand_offs is not None:
            flags["max_hand_offs"] = options.max_hand_offs
        if options.warm_up is not None:
            flags["warm_up"] = options.warm_up
        if not options.canaries:
            flags["canaries"] = False
        return flags

    def spoken(self, key: PointKey) -> list[Arrival]:
        """The point's schedule with its words."""
        measuring = self.measuring
        arrivals = measuring.arrivals(key)
        return measuring.grid.with_content(key, arrivals, self.served_tokenizer, measuring.seed)

    def expected_s(self, keys: Sequence[PointKey]) -> float:
        starts = len(_by_shape(keys)) * self.source.start_s
        return starts + self.measuring.grid.expected_offered_s(keys, TOKEN_S)

    def measure(
        self, keys: Sequence[PointKey], wants: Callable[[PointKey], bool] | None = None
    ) -> Generator[Measured]:
        for shape, group in _by_shape(keys).items():
            with self.source.open(shape) as cluster:
                order = self._order(shape, group)
                yield from _OnCluster(self, cluster).measure(order, wants)

    def _order(self, shape: Topology, group: Sequence[PointKey]) -> list[PointKey]:
        """Shuffled within each repeat: drifts of the machine line up with no rate or route."""
        order = list(group)
        random.Random(seed_for(self.measuring.seed, "order", shape)).shuffle(order)
        return sorted(order, key=lambda key: key.repeat)


def _by_shape(keys: Sequence[PointKey]) -> dict[Topology, list[PointKey]]:
    groups: dict[Topology, list[PointKey]] = {}
    for key in keys:
        groups.setdefault(shape_of(Topology.parse(key.topology)), []).append(key)
    return groups


class _OnCluster:
    """The points of one cluster, one after the other."""

    def __init__(self, backend: LiveBackend, cluster: Cluster) -> None:
        self._backend = backend
        self._measuring = backend.measuring
        self._cluster = cluster
        self._wrong_answers: list[str] = []
        self._pulls = False
        self._slow_link: SlowLink | None = None
        self._points = 0

    def measure(
        self, keys: Sequence[PointKey], wants: Callable[[PointKey], bool] | None
    ) -> Iterator[Measured]:
        self._pulls = any(key.policy == Route.PULL for key in keys)
        self._check_answers()
        self._slow_link = self._measured_link()
        for key in keys:
            if wants is None or wants(key):
                yield self._until_measured(key)

    def _check_answers(self, only: int | None = None) -> None:
        """Wrong KV comes with HTTP 200; a cluster that ever had it proves no path."""
        if not self._backend.options.canaries:
            return
        found = check_canaries(
            self._cluster.spec,
            self._cluster.facts.model,
            pull=self._pulls,
            only=only,
            notice=lambda said: self._backend.say(f"canary: {said}"),
        )
        self._wrong_answers += found
        for problem in found:
            self._backend.say(f"canary: {problem}")

    def _measured_link(self) -> SlowLink | None:
        rate = self._backend.options.emulated_gb_per_s
        if rate is None or not self._cluster.spec.topology.prefill_nodes:
            return None
        facts = self._cluster.facts
        if facts.block_size is None:
            raise EngineError("--emulate-link: the engine does not say its block size")
        return measure_link(self._cluster.spec, facts.model, facts.block_size, rate * 1e9)

    def _until_measured(self, key: PointKey) -> Measured:
        """Two attempts, the second on a fresh cluster; then the failure is the result."""
        cause = ""
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1 or self._sick():
                self._start_afresh()
            try:
                return self._attempt(key, attempt)
            except EngineError as error:
                cause = str(error)
                self._backend.say(f"{key.slug}: attempt {attempt}: {cause}")
        return self._measuring.fail(key, cause, {"attempt": ATTEMPTS})

    def _sick(self) -> list[str]:
        return self._cluster.sick()

    def _start_afresh(self) -> None:
        """Raises EngineError when the cluster cannot come back: the sweep ends, resumable."""
        try:
            self._cluster.restart()
        except EngineError:
            if self._sick():
                raise

    def _attempt(self, key: PointKey, attempt: int) -> Measured:
        began_s = time.monotonic()
        arrivals = self._backend.spoken(key)
        outcome = self._play(key, arrivals)
        if sick := self._sick():
            said = f"{', '.join(sick)} did not answer the health check after the point"
            raise EngineError("; ".join([said, *self._cluster.dead().values()]))
        self._check_answers(only=self._points)
        self._points += 1
        outcome.facts["prompts_are_ids"] = not any(_is_text(arrival) for arrival in arrivals)
        if self._wrong_answers:
            outcome.facts["path_proven"] = False
        outcome.timing |= {
            "attempt": attempt,
            "total_s": time.monotonic() - began_s,
            "problems": [*self._wrong_answers, *outcome.facts.get("path_problems", [])],
            "nodes": {node.name: node.url for node in self._cluster.nodes},
        }
        return self._measuring.finish(key, outcome, self._cluster.facts.block_size, arrivals)

    def _play(self, key: PointKey, arrivals: list[Arrival]) -> PointOutcome:
        async def bounded() -> PointOutcome:
            async with asyncio.timeout(self._backend.options.point_timeout_s):
                return await run_live_point(
                    cast(self._cluster.spec, Topology.parse(key.topology)),
                    policy_of(key),
                    arrivals,
                    key.rate_per_s,
                    self._settings(key),
                    self._measuring.seed_of(key),
                )

        try:
            return uvloop.run(bounded())
        except TimeoutError as error:
            limit_s = self._backend.options.point_timeout_s
            raise EngineError(f"the point did not end within {limit_s:g} s") from error

    def _settings(self, key: PointKey) -> LiveSettings:
        grid = self._measuring.grid
        turns = TurnSettings(
            self._cluster.facts.model,
            exact_lengths=grid.engine.ignore_eos,
            recorded_replies=grid.engine.replies == "recorded",
            vocabulary=self._backend.options.vocabulary,
            for_pulls=key.policy == Route.PULL,
            slow_link=self._slow_link,
            max_hand_offs=self._backend.options.max_hand_offs,
            extra={"temperature": grid.engine.temperature},
        )
        return LiveSettings(turns, users=grid.users(key), warm_up=self._warm_up(key))

    def _warm_up(self, key: PointKey) -> list[Arrival]:
        """Conversations of their own, at once: as many on each home, so placement stays even."""
        wanted = self._backend.options.warm_up
        homes = len(Topology.parse(key.topology).homes)
        count = homes if wanted is None else wanted
        drawn = self._measuring.grid.schedule(key, seed_for(self._measuring.seed, "warm-up"))
        return [Arrival(0.0, _short(arrival.conversation)) for arrival in drawn[:count]]


def _is_text(arrival: Arrival) -> bool:
    first = arrival.conversation.turns[0]
    return first.text is not None and first.token_ids is None


def _short(conversation: Conversation) -> Conversation:
    return replace(
        conversation,
        id=f"warm-up/{conversation.id}",
        turns=conversation.turns[:WARM_UP_TURNS],
    )
