"""From a user's choices to a finished micro-benchmark, on whichever engine was named."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import uvloop

from ppdbench.core.seeds import seed_for
from ppdbench.core.topology import Topology
from ppdbench.experiments.microbench.attribution_run import (
    Attribution,
    AttributionPlan,
    measure_attribution,
    simulate_attribution,
)
from ppdbench.experiments.microbench.engines import (
    Chosen,
    Clock,
    Told,
    live_cluster,
    live_engine,
    live_identity,
    sim_config,
    simulated_identity,
)
from ppdbench.experiments.microbench.handoff import HandoffPlan
from ppdbench.experiments.microbench.handoff_run import (
    Handoff,
    Pair,
    measure_handoff,
    simulate_handoff,
    split_pair,
)
from ppdbench.experiments.microbench.interference import Interference, measure, simulate
from ppdbench.experiments.microbench.live import LiveEngine
from ppdbench.experiments.microbench.plan import InterferencePlan, Limits
from ppdbench.experiments.microbench.preflight import look
from ppdbench.experiments.microbench.results import SCHEMA_VERSION
from ppdbench.experiments.microbench.simulated import SimulatedEngine
from ppdbench.runs.manifest import EngineIdentity, Manifest
from ppdbench.runs.records import TurnRecord


@dataclass(slots=True)
class Finished:
    """A document, the records behind it, and what it was made with."""

    document: dict[str, Any]
    records: list[TurnRecord]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Manner:
    """What a run says as it goes, whether simulated tokens stay, and how long it may take."""

    tell: Told
    keep_records: bool = False
    clock: Clock = field(default_factory=Clock)

    def is_over(self) -> bool:
        return self.clock.is_over


def run_interference(
    chosen: Chosen, plan: InterferencePlan, manner: Manner, *, explicit: bool
) -> Finished:
    """The interference experiment on the chosen engine."""
    if chosen.backend == "sim":
        engine = SimulatedEngine(sim_config(chosen), seed=plan.seed)
        found = simulate(plan, engine, explicit=explicit, keep_records=manner.keep_records)
        return _finished(found, simulated_identity(engine), plan)
    return run_live(_measured(chosen, plan, manner, explicit=explicit))


async def _measured(
    chosen: Chosen, plan: InterferencePlan, manner: Manner, *, explicit: bool
) -> Finished:
    async with live_engine(chosen, plan.seed, manner.tell) as (engine, identity):
        manner.tell("preflight: limits and cached tokens")
        limits = await look(engine, [batch + plan.doses for batch in plan.batches])
        found = await measure(
            plan, engine, limits, explicit=explicit, tell=manner.tell, is_over=manner.is_over
        )
    return _finished(found, replace(identity, block_size=limits.block_tokens), plan)


def _finished(found: Interference, identity: EngineIdentity, plan: InterferencePlan) -> Finished:
    document = header("interference", identity) | {"plan": asdict(plan)} | found.document()
    return Finished(document, found.records, Manifest(identity, grid="microbench", seed=plan.seed))


def header(protocol: str, identity: EngineIdentity) -> dict[str, Any]:
    """What every document says of its origin."""
    known = ("backend", "engine", "engine_version", "model", "gpu", "connector", "block_size")
    return {
        "kind": "microbench",
        "schema_version": SCHEMA_VERSION,
        "protocol": protocol,
        "simulated": identity.backend == "sim",
        **{name: getattr(identity, name) for name in known},
    }


def run_live(work: Coroutine[Any, Any, Finished]) -> Finished:
    """Run a coroutine on uvloop, whose timers and reads lag least."""
    finished: Finished = uvloop.run(work)
    return finished


def run_attribution(chosen: Chosen, plan: AttributionPlan, manner: Manner) -> Finished:
    """The published test and its controls on the chosen engine."""
    if chosen.backend == "sim":
        config = sim_config(chosen)
        engines = {on: SimulatedEngine(config, seed=plan.seed, cascade=on) for on in (True, False)}
        found = simulate_attribution(plan, engines, keep_records=manner.keep_records)
        return _attributed(found, simulated_identity(engines[True]))
    return run_live(_attribute_live(chosen, plan, manner))


def run_handoff(chosen: Chosen, plan: HandoffPlan, manner: Manner) -> Finished:
    """The hand-off experiment on the chosen engine."""
    if chosen.backend == "sim":
        config = sim_config(chosen)
        found = simulate_handoff(plan, config, keep_records=manner.keep_records)
        return _handed_off(found, simulated_identity(SimulatedEngine(config, seed=plan.seed)))
    return run_live(_hand_off_live(chosen, plan, manner))


async def _hand_off_live(chosen: Chosen, plan: HandoffPlan, manner: Manner) -> Finished:
    with live_cluster(chosen, Topology.parse("1P_1D"), manner.tell) as cluster:
        _, alone = split_pair(cluster.spec)
        engine = LiveEngine(
            alone.nodes[0].url,
            cluster.facts.model,
            seed=seed_for(plan.seed, time.time_ns()),
            headers=alone.nodes[0].headers(),
        )
        manner.tell("preflight: limits and cached tokens")
        try:
            limits = await look(engine)
        finally:
            await engine.close()
        pair = Pair(cluster.spec, engine.model, limits)
        found = await measure_handoff(plan, pair, manner.tell, manner.is_over)
        facts = cluster.facts
        identity = live_identity(chosen, facts.version, facts.model, limits.block_tokens)
    return _handed_off(found, replace(identity, connector="nixl"))


def _handed_off(found: Handoff, identity: EngineIdentity) -> Finished:
    plan = found.plan
    document = header("handoff", identity) | {"plan": asdict(plan)} | found.document()
    return Finished(document, found.records, Manifest(identity, grid="microbench", seed=plan.seed))


async def _attribute_live(chosen: Chosen, plan: AttributionPlan, manner: Manner) -> Finished:
    identities: list[EngineIdentity] = []
    # Closed here, also when interrupted: left to the loop's end, its engine outlives its client.
    async with aclosing(_launches(chosen, plan, identities, manner.tell)) as engines:
        found = await measure_attribution(plan, engines, manner.tell, manner.is_over)
    return _attributed(found, replace(identities[0], block_size=found.limits.block_tokens))


async def _launches(
    chosen: Chosen, plan: AttributionPlan, identities: list[EngineIdentity], tell: Told
) -> AsyncGenerator[tuple[bool, LiveEngine, Limits], None]:
    """With cascade attention, then without; once, as it is, where there is no switch."""
    flags = {True: ("--no-disable-cascade-attn",), False: ("--disable-cascade-attn",)}
    for cascade in (True,) if plan.no_cascade_switch else (True, False):
        more = () if plan.no_cascade_switch else flags[cascade]
        one = replace(chosen, engine_args=(*chosen.engine_args, *more))
        async with live_engine(one, plan.seed, tell) as (engine, identity):
            identities.append(identity)
            tell("preflight: limits and cached tokens")
            crowds = [batch + max(plan.injected) for batch in plan.batches]
            yield cascade, engine, await look(engine, crowds)


def _attributed(found: Attribution, identity: EngineIdentity) -> Finished:
    plan = found.plan
    document = header("paper", identity) | {"plan": asdict(plan)} | found.document()
    return Finished(document, found.records, Manifest(identity, grid="microbench", seed=plan.seed))
