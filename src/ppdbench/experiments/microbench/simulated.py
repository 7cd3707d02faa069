"""Runs a script on one simulated node, on simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError
from ppdbench.core.seeds import unit_interval
from ppdbench.experiments.microbench.plan import Limits
from ppdbench.experiments.microbench.script import Ask, Script
from ppdbench.runs.records import TurnRecord
from ppdbench.sim.cascade import AttentionShape, CascadeCosts, SharedKey, SharedPrefixCache
from ppdbench.sim.config import SimConfig
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.models import model_shape
from ppdbench.sim.node import Sequence
from ppdbench.sim.prepare import capacity_for, costs_for
from ppdbench.sim.watched import WatchedNode

SHARED = "shared/"
"""Segments whose name begins so are one prefix for many requests at a time."""


class SimulatedEngine:
    """One kind of node; every script gets a fresh, cold one.

    ``cascade`` is cascade attention's effect on shared prefixes. ``seed`` draws where in a step an
    injection falls, as a real client's would fall anywhere.
    """

    def __init__(self, config: SimConfig, *, seed: int, cascade: bool = True) -> None:
        self.config = config
        self.cascade = cascade
        self._seed = seed
        self._costs = costs_for(config)
        self._capacity = capacity_for(config)

    def __repr__(self) -> str:
        return f"<SimulatedEngine {self.config.model} on {self.config.gpu}>"

    def limits(self) -> Limits:
        """What the simulated node can hold."""
        return Limits(
            self._capacity.context_tokens,
            self._capacity.blocks * self.config.block_tokens,
            self.config.max_sequences,
            self.config.block_tokens,
            self._capacity.kv_bytes_per_token,
        )

    def run(self, script: Script) -> list[TurnRecord]:
        """Play ``script`` to its end; the records are in the order of sending.

        Raises:
            EngineError: the engine came to rest before the script was done.
        """
        play = _Play(self, script)
        play.kernel.run()
        if not script.done:
            raise EngineError("the simulated node came to rest before its script ended")
        return play.records()

    def node(self, kernel: Kernel, on_first_token: Callable[[Sequence], None]) -> WatchedNode:
        """A cold node on ``kernel``."""
        config, cascade = self.config, self._cascade_costs()
        node = WatchedNode(
            "r0",
            kernel,
            cascade or self._costs,
            SharedPrefixCache(
                self._capacity.blocks, config.block_tokens, enabled=config.prefix_caching
            ),
            overheads=config.overheads,
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
            on_first_token=on_first_token,
        )
        if cascade is not None:
            cascade.serve(node)
        return node

    def _cascade_costs(self) -> CascadeCosts | None:
        if not self.cascade:
            return None
        shape = model_shape(self.config.model)
        return CascadeCosts(self._costs, AttentionShape(shape.heads, shape.kv_heads))

    def phase(self, name: str) -> float:
        """Where in a step a request falls, in [0, 1)."""
        return unit_interval(f"phase/{name}", self._seed)


class _Play:
    def __init__(self, engine: SimulatedEngine, script: Script) -> None:
        self.kernel = Kernel()
        self._engine, self._script = engine, script
        self._node = engine.node(self.kernel, self._first_token)
        self._sent: dict[str, tuple[Ask, float, Sequence]] = {}
        self._not_begun = 0
        self._last_start_step = 0
        self._pinned: set[str] = set()
        self._send(script.begin())

    def records(self) -> list[TurnRecord]:
        return [self._record(*sent) for sent in self._sent.values()]

    def _send(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._not_begun += ask.paces
            step_s = self._node.step_s
            jitter_s = 0.0 if ask.paces else self._engine.phase(ask.name) * step_s
            self.kernel.at(self.kernel.now_s + ask.delay_s + jitter_s, self._start, ask)

    def _start(self, ask: Ask) -> None:
        sequence = self._sequence(ask)
        self._sent[ask.name] = (ask, self.kernel.now_s, sequence)
        ready_s = self.kernel.now_s + self._engine.config.overheads.request_s
        self.kernel.at(ready_s, self._node.submit, sequence)

    def _sequence(self, ask: Ask) -> Sequence:
        """Content is named by the prompt's first segment, which is what may be cached."""
        first = ask.prompt[0]
        key: object = first.name
        if first.name.startswith(SHARED):
            self._pin(first.name, first.tokens)
            key = SharedKey(first.name, first.tokens, ask.name)
        return Sequence(
            key,
            ask.prompt_tokens,
            ask.output_tokens,
            on_done=partial(self._done, ask.name),
            matching_tokens=first.tokens,
            owner=ask,
        )

    def _pin(self, prefix: str, tokens: int) -> None:
        cache = self._node.cache
        if prefix not in self._pinned and isinstance(cache, SharedPrefixCache):
            cache.pin(prefix, tokens)
            self._pinned.add(prefix)

    def _first_token(self, sequence: Sequence) -> None:
        ask = sequence.owner
        if isinstance(ask, Ask) and ask.paces:
            self._not_begun -= 1
            self._last_start_step = self._node.steps
            self._set_alarm()

    def _set_alarm(self) -> None:
        if not self._not_begun and not self._script.done:
            step = self._last_start_step + self._script.wanted_pace - 1
            self._node.at_step(step, self._paced)

    def _paced(self) -> None:
        pace = self._node.steps - self._last_start_step + 1
        if not self._script.done and pace >= self._script.wanted_pace:
            before = self._script.wanted_pace
            self._send(self._script.progressed(pace))
            if self._script.wanted_pace != before:
                self._set_alarm()

    def _done(self, name: str, sequence: Sequence) -> None:  # noqa: ARG002
        if not self._script.done:
            before = self._script.wanted_pace
            self._send(self._script.ended(name))
            if self._last_start_step and self._script.wanted_pace != before:
                self._set_alarm()

    def _record(self, ask: Ask, sent_s: float, sequence: Sequence) -> TurnRecord:
        instants = self._node.token_at_s(sequence)
        return TurnRecord(
            ask.name,
            1,
            Route.REPLICA,
            self._node.name,
            scheduled_at_s=sent_s,
            sent_at_s=sent_s,
            first_token_at_s=instants[0] if instants else None,
            finished_at_s=instants[-1] if instants else None,
            new_tokens=ask.prompt_tokens,
            wanted_output_tokens=ask.output_tokens,
            prompt_tokens=ask.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            output_tokens=len(instants),
            token_at_s=instants,
        )
