"""One point on a real cluster, on the wall clock."""

from __future__ import annotations

import asyncio
import resource
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppdbench.cluster.contract import ClusterSpec
from ppdbench.cluster.counters import Readings, read_nodes
from ppdbench.cluster.proof import Proof, prove
from ppdbench.core.conversation import Arrival
from ppdbench.core.errors import EngineError
from ppdbench.load.clock import WallClock
from ppdbench.load.conversation import Play
from ppdbench.load.driver import Driver
from ppdbench.load.turns import HttpTurns, TurnSettings
from ppdbench.policy.base import Policy
from ppdbench.runs.points import PointOutcome

BEAT_S = 0.01
WATCH_EVERY_BEATS = 25
CONNECTIONS_WARM = 8
PROOF_ATTEMPTS = 4
PROOF_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How a live point is run.

    ``users`` makes it a closed loop of that many conversations at a time. ``warm_up`` runs to its
    end before the clock of the point starts; its records are marked. ``on_progress`` gets the
    number of turns sent and of turns out, now and then.
    """

    turns: TurnSettings
    users: int | None = None
    warm_up: Sequence[Arrival] = ()
    on_progress: Callable[[int, int], None] | None = field(default=None, compare=False)


async def run_live_point(  # noqa: PLR0913, PLR0917  (a point is these things)
    cluster: ClusterSpec,
    policy: Policy,
    arrivals: Sequence[Arrival],
    rate_per_s: float,
    settings: LiveSettings,
    seed: int,
) -> PointOutcome:
    """Offer ``arrivals`` and wait for the last answer.

    Caches are cold for the point: a salt that nobody used before goes into every request. The
    same ``seed`` sends the same prompts. Call it inside ``asyncio.timeout`` to bound it; then the
    turns that are out are cancelled at the engines.
    """
    raise_file_limit()
    point = _LivePoint(cluster, policy, rate_per_s, settings, seed)
    try:
        return await point.run(arrivals)
    finally:
        await point.close()


def raise_file_limit() -> None:
    """No connection cap of ours, so no low one of the shell's either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _LivePoint:
    def __init__(
        self,
        cluster: ClusterSpec,
        policy: Policy,
        rate_per_s: float,
        settings: LiveSettings,
        seed: int,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._clock = WallClock()
        salt = f"{seed}-{secrets.token_hex(8)}"
        self._turns = HttpTurns(cluster, self._clock, settings.turns, salt=salt, seed=seed)
        self._play = Play(
            cluster.topology,
            policy,
            rate_per_s,
            running=self._turns.running,
            outstanding=self._turns.outstanding,
        )
        self._beats = 0
        self._loop_lags_s: list[float] = []

    async def run(self, arrivals: Sequence[Arrival]) -> PointOutcome:
        await self._turns.warm(CONNECTIONS_WARM)
        if self._settings.warm_up:
            await self._offer(self._settings.warm_up, warm_up=True)
        before = await self._settled_nodes()
        self._clock.restart()
        self._turns.send_lags_s.clear()
        self._loop_lags_s.clear()
        await self._offer(arrivals, warm_up=False)
        wall_s = self._clock.now_s
        facts = self._facts(arrivals)
        if before is not None:
            facts |= _proof_facts(await self._proof(before))
        return PointOutcome(self._play.records, facts, {"wall_s": wall_s})

    async def close(self) -> None:
        await self._turns.close()
        self._clock.close()

    async def _offer(self, arrivals: Sequence[Arrival], *, warm_up: bool) -> None:
        ended = asyncio.Event()
        driver = Driver(self._clock, self._turns, self._play, warm_up=warm_up, on_idle=ended.set)
        driver.start(arrivals, self._settings.users)
        beats = asyncio.get_running_loop().create_task(self._beat())
        try:
            await ended.wait()
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        """Sample how late this loop runs, look after deadlines, tell progress."""
        while True:
            due_s = self._clock.now_s + BEAT_S
            woken = asyncio.Event()
            self._clock.at(due_s, lambda event: event.set(), woken)
            await woken.wait()
            self._loop_lags_s.append(self._clock.now_s - due_s)
            self._beats += 1
            if self._beats % WATCH_EVERY_BEATS == 0:
                self._turns.watch()
                if self._settings.on_progress is not None:
                    self._settings.on_progress(len(self._play.records), self._turns.turns_out)

    async def _read_nodes(self) -> Readings | None:
        """What the nodes have counted so far; ``None`` when one of them does not say."""
        try:
            return await asyncio.to_thread(read_nodes, self._cluster)
        except (EngineError, ValueError):  # no /metrics, or none that can be parsed
            return None

    async def _settled_nodes(self) -> Readings | None:
        """As :meth:`_read_nodes`, once what came before the point has been counted."""
        reading = await self._read_nodes()
        for _ in range(PROOF_ATTEMPTS if self._settings.warm_up else 0):
            await asyncio.sleep(PROOF_PAUSE_S)
            earlier, reading = reading, await self._read_nodes()
            if reading == earlier:
                break
        return reading

    async def _proof(self, before: Readings) -> Proof | None:
        """Which path the turns took. Engines count at their next step, so a no is asked again."""
        proof = None
        for _ in range(PROOF_ATTEMPTS):
            after = await self._read_nodes()
            if after is None:
                return None
            proof = self._prove(before, after)
            if not proof.problems:
                break
            await asyncio.sleep(PROOF_PAUSE_S)
        return proof

    def _prove(self, before: Readings, after: Readings) -> Proof:
        """A failed turn may or may not have moved KV, so a proof without or with them will do."""
        measured = [record for record in self._play.records if not record.warm_up]
        good = Counter(record.route for record in measured if record.ok)
        proof = prove(self._cluster, before, after, good)
        if proof.problems and sum(good.values()) < len(measured):
            every = Counter(record.route for record in measured)
            with_failed = prove(self._cluster, before, after, every)
            return proof if with_failed.problems else with_failed
        return proof

    def _facts(self, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        instants = [arrival.at_s for arrival in arrivals]
        counted = [r for r in self._play.records if not r.warm_up]
        recomputed = [r.recomputed_tokens for r in counted if r.recomputed_tokens is not None]
        return {
            "send_lag_p99_s": _p99(self._turns.send_lags_s),
            "loop_lag_p99_s": _p99(self._loop_lags_s),
            "path_proven": None,
            "bytes_moved": None,
            "recomputed_tokens": sum(recomputed) if recomputed else None,
            "window_s": max(instants) - min(instants) if instants else 0.0,
        }


def _proof_facts(proof: Proof | None) -> dict[str, Any]:
    if proof is None:
        return {}
    return {
        "path_proven": proof.proven,
        "path_problems": list(proof.problems),
        "bytes_moved": proof.bytes_moved,
    }


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
