"""The fast node against a naive one that takes every step and asks for every block."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import pytest

from ppdbench.sim.config import Overheads
from ppdbench.sim.content_cache import ContentCache
from ppdbench.sim.costs import CostTables
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Node, Sequence
from ppdbench.sim.prefix_cache import PrefixCache

BLOCK = 16
GRID = (0, 32, 64, 128, 512)
COSTS = CostTables(
    dense_s=[0.0, *(5e-3 + 2e-5 * n for n in range(1, 300))],
    batches=(1, 4, 16),
    contexts=GRID,
    decode_attention_s=[[1e-6 * b * (10 + c) ** 1.1 for c in GRID] for b in (1, 4, 16)],
    chunks=(0, 64, 256),
    prefixes=(0, 64, 256),
    prefill_attention_s=[[1e-7 * n * (n / 2 + p) for p in (0, 64, 256)] for n in (0, 64, 256)],
    source="test",
)  # fmt: skip
OVERHEADS = Overheads(step_s=1e-3, sequence_s=1e-4, sequence_cap_s=5e-4)


@dataclass
class Ask:
    """One turn: ``think_s`` after the conversation's previous one (or from the start)."""

    conversation: int
    turn: int
    think_s: float
    prompt: int
    output: int
    matching: int


@dataclass(eq=False)
class Content:
    names: list[tuple[int, int, int]]

    def block_names(self, tokens: int) -> list[tuple[int, int, int]]:
        return self.names[: tokens // BLOCK]


@dataclass(eq=False)
class Running:
    ask: Ask
    content: Content
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    prefilled: bool = False
    cached: int | None = None
    first_s: float | None = None
    end_s: float | None = None

    @property
    def target(self) -> int:
        return self.ask.prompt + self.generated


@dataclass
class Scenario:
    blocks: int
    budget: int
    slots: int
    turns: list[list[Ask]]

    @classmethod
    def random(cls, seed: int) -> Scenario:
        rng = np.random.default_rng(seed)
        blocks = int(rng.integers(24, 90))
        turns = [cls._conversation(rng, c, blocks) for c in range(int(rng.integers(4, 14)))]
        return cls(blocks, int(rng.integers(24, 250)), int(rng.integers(2, 10)), turns)

    @staticmethod
    def _conversation(rng: np.random.Generator, number: int, blocks: int) -> list[Ask]:
        asks, history, matching = [], 0, 0
        for turn in range(int(rng.integers(1, 5))):
            prompt = history + int(rng.integers(1, 120))
            output = int(rng.integers(1, 70))
            if prompt + output > blocks * BLOCK:
                break
            think_s = float(rng.exponential(0.15)) + 1e-4
            asks.append(Ask(number, turn, think_s, prompt, output, matching))
            history = prompt + output
            lost = rng.random() < 0.3
            matching = prompt + (int(rng.integers(0, output)) if lost else output)
        return asks


@dataclass
class Naive:
    """vLLM V1's rules, written down one by one."""

    plan: Scenario
    now_s: float = 0.0
    waiting: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    done: dict[tuple[int, int], Running] = field(default_factory=dict)

    def run(self) -> dict[tuple[int, int], Running]:
        self.cache = ContentCache(self.plan.blocks, BLOCK)
        self.names: dict[int, list[tuple[int, int, int]]] = {}
        self.pending = [(asks[0].think_s, c, 0) for c, asks in enumerate(self.plan.turns) if asks]
        heapq.heapify(self.pending)
        while self.pending or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now_s = max(self.now_s, self.pending[0][0])
            while self.pending and self.pending[0][0] <= self.now_s:
                _, c, turn = heapq.heappop(self.pending)
                self.waiting.append(self.arrive(self.plan.turns[c][turn]))
            self.step()
        return self.done

    def arrive(self, ask: Ask) -> Running:
        old = self.names.get(ask.conversation, [])[: ask.matching // BLOCK]
        total = -(-(ask.prompt + ask.output) // BLOCK)
        names = old + [(ask.conversation, ask.turn, i) for i in range(len(old), total)]
        self.names[ask.conversation] = names
        return Running(ask, Content(names))

    def hold(self, item: Running, tokens: int) -> None:
        more = -(-tokens // BLOCK) - item.blocks
        if more > 0:
            self.cache.grow(item.content, more)
            item.blocks += more

    def free(self) -> int:
        return self.cache.total - self.cache.held

    def decoding(self) -> list[Running]:
        return [item for item in self.running if item.prefilled]

    def preempt_newest(self) -> None:
        item = self.running.pop()
        self.cache.release(item.content, item.blocks, item.computed)
        item.blocks = item.computed = 0
        item.prefilled = False
        item.ask.matching = item.target
        self.waiting.insert(0, item)

    def step(self) -> None:
        while sum(i.blocks * BLOCK <= i.computed for i in self.decoding()) > self.free():
            self.preempt_newest()
        for item in self.decoding():
            self.hold(item, item.computed + 1)
        chunks = self.schedule()
        decoding = [i for i in self.decoding() if i not in [c[0] for c in chunks]]
        if not chunks and not decoding:
            assert not self.waiting or self.pending
            self.now_s = self.pending[0][0] if self.pending else self.now_s
            return
        self.now_s += self.seconds(chunks, decoding)
        self.advance(chunks, decoding)

    def schedule(self) -> list[tuple[Running, int]]:
        decoding = self.decoding()
        started = [i for i in self.running if i not in decoding]
        while started and self.room(started[0]) <= 0:
            self.preempt_newest()
            started = [i for i in self.running if i not in self.decoding()]
        budget = self.plan.budget - len(self.decoding())
        chunks = []
        for item in started:
            budget -= self.add(item, budget, chunks)
        while self.waiting and budget > 0 and len(self.running) < self.plan.slots:
            item = self.waiting[0]
            usable = min(item.ask.matching, item.target - 1)
            hit = self.cache.hit_blocks(item.content, usable)
            blocks = -(-min(item.target, hit * BLOCK + budget) // BLOCK)
            if blocks > self.free():
                break
            self.waiting.pop(0)
            self.cache.take(item.content, hit, blocks - hit)
            item.blocks, item.computed = blocks, hit * BLOCK
            item.cached = hit * BLOCK if item.cached is None else item.cached
            self.running.append(item)
            budget -= self.add(item, budget, chunks)
        return chunks

    def room(self, item: Running) -> int:
        return (item.blocks + self.free()) * BLOCK - item.computed

    def add(self, item: Running, budget: int, chunks: list) -> int:
        tokens = min(item.target - item.computed, budget, self.room(item))
        if tokens > 0:
            self.hold(item, item.computed + tokens)
            chunks.append((item, tokens))
        return tokens

    def seconds(self, chunks: list[tuple[Running, int]], decoding: list[Running]) -> float:
        seconds = OVERHEADS.host_s(len(self.running))
        seconds += COSTS.dense_s(len(decoding) + sum(n for _, n in chunks))
        seconds += sum(COSTS.prefill_attention_s(n, item.computed) for item, n in chunks)
        if decoding:
            mean = sum(i.computed for i in decoding) / len(decoding)
            seconds += COSTS.decode_line(len(decoding), mean).at_s
        return seconds

    def advance(self, chunks: list[tuple[Running, int]], decoding: list[Running]) -> None:
        for item in decoding:
            item.computed += 1
            self.token(item)
        for item, n in chunks:
            item.computed += n
            if item.computed == item.target:
                self.token(item)

    def token(self, item: Running) -> None:
        item.generated += 1
        item.prefilled = True
        if item.first_s is None:
            item.first_s = self.now_s
        if item.generated < item.ask.output:
            return
        item.end_s = self.now_s
        self.running.remove(item)
        self.cache.release(item.content, item.blocks, item.computed)
        ask = item.ask
        self.done[ask.conversation, ask.turn] = item
        later = self.plan.turns[ask.conversation]
        if ask.turn + 1 < len(later):
            at_s = self.now_s + later[ask.turn + 1].think_s
            heapq.heappush(self.pending, (at_s, ask.conversation, ask.turn + 1))


def fast(plan: Scenario) -> tuple[dict[tuple[int, int], Sequence], Node]:
    kernel = Kernel()
    node = Node(
        "r0",
        kernel,
        COSTS,
        PrefixCache(plan.blocks, BLOCK),
        overheads=OVERHEADS,
        max_batched_tokens=plan.budget,
        max_sequences=plan.slots,
    )
    done: dict[tuple[int, int], Sequence] = {}

    def send(ask: Ask) -> None:
        def finished(sequence: Sequence) -> None:
            assert 0 <= node.cache.held <= plan.blocks
            assert node.cache.held + node.cache.cached <= plan.blocks
            done[ask.conversation, ask.turn] = sequence
            later = plan.turns[ask.conversation]
            if ask.turn + 1 < len(later):
                following = later[ask.turn + 1]
                kernel.at(kernel.now_s + following.think_s, send, following)

        node.submit(
            Sequence(
                ask.conversation,
                ask.prompt,
                ask.output,
                on_done=finished,
                matching_tokens=ask.matching,
            )
        )

    for asks in plan.turns:
        if asks:
            kernel.at(asks[0].think_s, send, asks[0])
    kernel.run()
    return done, node


@pytest.mark.parametrize("seed", range(100))
def test_the_fast_node_equals_a_naive_one(seed):
    """Same hits, same first and last token to a nanosecond, same preemptions, no block lost."""
    sequences, node = fast(Scenario.random(seed))
    items = Naive(Scenario.random(seed)).run()

    assert sequences.keys() == items.keys()
    for key, item in items.items():
        sequence = sequences[key]
        assert sequence.cached_tokens == item.cached, key
        assert sequence.first_token_at_s == pytest.approx(item.first_s, abs=1e-9), key
        assert sequence.finished_at_s == pytest.approx(item.end_s, abs=1e-9), key
    assert node.cache.held == 0


def test_the_scenarios_reach_the_hard_cases():
    """Among the hundred there are preemptions, evictions, hits and full slots."""
    runs = [fast(Scenario.random(seed)) for seed in range(100)]

    assert sum(node.preemptions > 0 for _, node in runs) >= 20
    assert sum(any(s.cached_tokens for s in done.values()) for done, _ in runs) >= 50
