"""One engine: vLLM V1's scheduler in small, advancing whole stretches of decoding at once.

At each step boundary running sequences come first (one token per decoding sequence, then the rest
of started prompts), then waiting ones, under a token budget. Between arrivals, completions and
chunk boundaries nothing is decided, so such a stretch is one event: the time of step i is linear
in i (attention reads one more token per sequence each step) and its sum has a closed form.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import takewhile
from math import ceil, sqrt

from ppdbench.sim.blocks import KvBlocks
from ppdbench.sim.config import Overheads
from ppdbench.sim.costs import CostTables
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.step_log import Span, StepLog, Stretch

NEVER = -1


class Sequence:
    """A request as one engine sees it. The node owns every field after ``owner``.

    ``matching_tokens`` of the prompt are what this conversation left behind last time. With
    ``fetch`` the KV of the prompt comes from elsewhere: the node reserves blocks, calls
    ``fetch(sequence)`` and waits for :meth:`Node.kv_arrived`. ``loaded`` KV comes in with the first
    step, which takes ``stall_s`` longer for it. ``hold`` keeps the blocks after the
    last token until :meth:`Node.release`. ``on_done`` is called at the last token.
    """

    __slots__ = (
        "blocks", "cached_tokens", "computed", "fetch", "fetched_tokens", "finish_step",
        "finished_at_s", "first_token_at_s", "generated", "hold", "key", "loaded",
        "matching_tokens", "on_done", "output_tokens", "owner", "preemptions", "prompt_tokens",
        "spans", "stall_s", "start_step", "target",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - one field each
        self,
        key: Hashable,
        prompt_tokens: int,
        output_tokens: int,
        *,
        on_done: Callable[[Sequence], None],
        matching_tokens: int = 0,
        fetch: Callable[[Sequence], None] | None = None,
        hold: bool = False,
        loaded: bool = False,
        stall_s: float = 0.0,
        owner: object = None,
    ) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.on_done = on_done
        self.matching_tokens = matching_tokens
        self.fetch = fetch
        self.hold = hold
        self.loaded = loaded
        self.stall_s = stall_s
        self.owner = owner
        self.spans: list[Span] = []
        self.target = prompt_tokens
        self.computed = 0
        self.generated = 0
        self.blocks = 0
        self.cached_tokens = 0
        self.fetched_tokens = 0
        self.start_step = 0
        self.finish_step = NEVER
        self.preemptions = 0
        self.first_token_at_s = -1.0
        self.finished_at_s = -1.0


class Node:
    """One engine on a kernel's clock."""

    def __init__(  # noqa: PLR0913 - wired once, by the cluster
        self,
        name: str,
        kernel: Kernel,
        costs: CostTables,
        cache: KvBlocks,
        *,
        overheads: Overheads,
        max_batched_tokens: int,
        max_sequences: int,
        longest_stretch: int = 1 << 40,
        log: StepLog | None = None,
    ) -> None:
        self.name = name
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.steps = 0
        self.preemptions = 0
        self._kernel, self._costs, self._overheads = kernel, costs, overheads
        self._budget, self._max_sequences = max_batched_tokens, max_sequences
        self._longest_stretch = longest_stretch
        self.log = log
        self._prompts: list[Sequence] = []
        self._batch = 0
        self._context_sum = 0
        self._unsettled = 0
        self._finishes: list[tuple[int, int, Sequence]] = []
        self._order = 0
        self._busy = False
        self._chunks: list[tuple[Sequence, int]] = []
        self._ticket = 0
        self._stretch_steps = 0
        self._stretch_from_s = 0.0
        self._first_s = 0.0
        self._slope_s = 0.0

    def __repr__(self) -> str:
        return f"<Node {self.name} step {self.steps} running {len(self.running)}>"

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence now; it is looked at when the step under way ends."""
        self.waiting.append(sequence)
        self._attend()

    def kv_arrived(self, sequence: Sequence, tokens: int) -> None:
        """The KV of the first ``tokens`` of the prompt is here; the rest is computed next."""
        sequence.computed = tokens
        sequence.fetch = None
        self.waiting.appendleft(sequence)
        self._attend()

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence that was held."""
        self.cache.release(sequence.key, sequence.blocks, sequence.computed)
        sequence.blocks = 0
        if self.waiting:
            self._attend()

    def generated(self, sequence: Sequence) -> int:
        """Tokens the sequence has got by the last step's end."""
        if sequence.finish_step == NEVER:
            return sequence.generated
        return sequence.generated + self.steps - sequence.start_step

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs; what is under way in this step is thrown away."""
        if sequence in self.running:
            self._drop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.cache.release(sequence.key, sequence.blocks, sequence.computed)
        self._chunks = [(other, n) for other, n in self._chunks if other is not sequence]
        if self._stretch_steps > 1:
            self._cut()

    def _attend(self) -> None:
        if not self._busy:
            self._busy = True
            self._begin()
        elif self._stretch_steps > 1:
            self._cut()

    def _begin(self) -> None:
        """At a step boundary: decide what runs next."""
        self._make_room()
        stall_s = self._plan() if self.waiting or self._prompts else 0.0
        if self._chunks:
            self._start_mixed_step(stall_s)
        elif self._batch:
            self._start_stretch()
        else:
            self._busy = False

    # -- choosing what to compute ------------------------------------------------------------

    def _plan(self) -> float:
        """Fill the step's token budget; returns what synchronous KV loads add to the step."""
        self._unblock_prompts()
        budget = self._budget - self._batch
        for sequence in self._prompts:
            budget -= self._add_chunk(sequence, budget)
        stall_s = 0.0
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if len(self.running) >= self._max_sequences or not self._admit(sequence, budget):
                break
            self.waiting.popleft()
            if sequence.fetch is not None:
                sequence.fetch(sequence)
                continue
            self.running[sequence] = None
            self._prompts.append(sequence)
            budget -= self._add_chunk(sequence, budget)
            stall_s += sequence.stall_s
        return stall_s

    def _add_chunk(self, sequence: Sequence, budget: int) -> int:
        tokens = min(sequence.target - sequence.computed, budget)
        tokens = min(tokens, self._room_for(sequence))
        if tokens > 0:
            self._hold_up_to(sequence, sequence.computed + tokens)
            self._chunks.append((sequence, tokens))
        return tokens

    def _room_for(self, sequence: Sequence) -> int:
        """Tokens this sequence may still add in the blocks it has and those that are free."""
        cache = self.cache
        self._settle_if_tight(cache.blocks_for(sequence.target))
        free = cache.total - cache.held
        return (sequence.blocks + free) * cache.block_tokens - sequence.computed

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Look up the cache and hold the blocks of the first chunk, or of all that is fetched."""
        if sequence.blocks:
            return True
        cache = self.cache
        self._settle_if_tight(cache.blocks_for(sequence.target))
        hit = cache.hit_blocks(sequence.key, min(sequence.matching_tokens, sequence.target - 1))
        hit_tokens = hit * cache.block_tokens
        goal = sequence.target
        if sequence.fetch is None and not sequence.loaded:
            goal = min(goal, hit_tokens + budget)
        blocks = cache.blocks_for(goal)
        if not cache.fits(blocks):
            return False
        cache.take(sequence.key, hit, blocks - hit)
        sequence.blocks = blocks
        sequence.computed = sequence.target - 1 if sequence.loaded else hit_tokens
        if sequence.preemptions == 0:
            sequence.cached_tokens = hit_tokens
        return True

    def _hold_up_to(self, sequence: Sequence, tokens: int) -> None:
        more = self.cache.blocks_for(tokens) - sequence.blocks
        if more > 0:
            self.cache.grow(sequence.key, more)
            sequence.blocks += more

    # -- one step with prompt tokens ---------------------------------------------------------

    def _start_mixed_step(self, stall_s: float) -> None:
        costs, tokens = self._costs, self._batch
        seconds = stall_s + self._overheads.host_s(len(self.running))
        for sequence, new in self._chunks:
            tokens += new
            seconds += costs.prefill_attention_s(new, sequence.computed)
        if self._batch:
            seconds += costs.decode_line(self._batch, self._context_sum / self._batch).at_s
        seconds += costs.dense_s(tokens)
        self._stretch_from_s, self._first_s, self._slope_s = self._kernel.now_s, seconds, 0.0
        self._kernel.at(self._kernel.now_s + seconds, self._end_mixed_step)

    def _end_mixed_step(self, _: object) -> None:
        chunks, self._chunks = self._chunks, []
        if self.log is not None:
            self._note(1, sum(new for _, new in chunks))
        self._advance(1)
        for sequence, new in chunks:
            sequence.computed += new
            if sequence.computed == sequence.target:
                self._prompts.remove(sequence)
                self._first_token(sequence)
        self._begin()

    def _first_token(self, sequence: Sequence) -> None:
        """The prompt is computed, and with it one more token (again the next after preemption)."""
        sequence.generated += 1
        if sequence.first_token_at_s < 0:
            sequence.first_token_at_s = self._kernel.now_s
        if sequence.generated >= sequence.output_tokens:
            sequence.spans.append((self.steps - 1, 0))
            self._finish(sequence)
            return
        sequence.start_step = self.steps
        sequence.finish_step = self.steps + sequence.output_tokens - sequence.generated
        self._order += 1
        heappush(self._finishes, (sequence.finish_step, self._order, sequence))
        self._batch += 1
        self._context_sum += sequence.target
        self._unsettled += 1

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished_at_s = self._kernel.now_s
        sequence.finish_step = NEVER
        del self.running[sequence]
        if not sequence.hold:
            self.cache.release(sequence.key, sequence.blocks, sequence.computed)
            sequence.blocks = 0
        sequence.on_done(sequence)

    # -- a stretch of decode steps -----------------------------------------------------------

    def _start_stretch(self) -> None:
        batch = self._batch
        line = self._costs.decode_line(batch, self._context_sum / batch)
        steps = min(self._next_finish() - self.steps, max(1, ceil(min(line.tokens, 1e9))))
        steps = min(steps, self._longest_stretch)
        self._first_s = line.at_s + self._overheads.host_s(batch) + self._costs.dense_s(batch)
        self._slope_s = line.slope_s
        self._stretch_from_s = self._kernel.now_s
        self._schedule_stretch(self._steps_that_fit(steps))

    def _next_finish(self) -> int:
        finishes = self._finishes
        while finishes[0][0] != finishes[0][2].finish_step:
            heappop(finishes)
        return finishes[0][0]

    def _schedule_stretch(self, steps: int) -> None:
        self._stretch_steps = steps
        self._ticket += 1
        seconds = steps * self._first_s + self._slope_s * (steps * (steps - 1) / 2)
        self._kernel.at(self._stretch_from_s + seconds, self._end_stretch, self._ticket)

    def _cut(self) -> None:
        """Somebody came: end the stretch with the step now under way."""
        elapsed = self._kernel.now_s - self._stretch_from_s
        half = self._first_s - self._slope_s / 2
        root = sqrt(max(0.0, half * half + 2 * self._slope_s * elapsed))
        steps = max(1, ceil(2 * elapsed / (half + root) - 1e-9))
        if steps < self._stretch_steps:
            self._schedule_stretch(steps)

    def _end_stretch(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        steps, self._stretch_steps = self._stretch_steps, 0
        if self.log is not None:
            self._note(steps, 0)
        self._advance(steps)
        self._begin()

    def _note(self, steps: int, prompt_tokens: int) -> None:
        assert self.log is not None
        start, first, slope = self._stretch_from_s, self._first_s, self._slope_s
        self.log.stretches.append(Stretch(start, first, slope, steps, self._batch, prompt_tokens))

    def _advance(self, steps: int) -> None:
        """Every decoding sequence gets ``steps`` tokens; those that are complete leave."""
        self.steps += steps
        batch = self._batch
        if not batch:
            return
        self._context_sum += batch * steps
        self._unsettled += batch * (steps // self.cache.block_tokens + 1)
        now, finishes = self.steps, self._finishes
        while finishes and finishes[0][0] <= now:
            step, _, sequence = heappop(finishes)
            if step == sequence.finish_step:
                self._complete(sequence)

    def _complete(self, sequence: Sequence) -> None:
        self._stop_decoding(sequence)
        self._hold_up_to(sequence, sequence.computed)
        self._finish(sequence)

    def _stop_decoding(self, sequence: Sequence) -> None:
        done = self.steps - sequence.start_step
        sequence.spans.append((sequence.start_step - 1, done))
        sequence.generated += done
        sequence.computed = sequence.target + done
        self._batch -= 1
        self._context_sum -= sequence.computed

    # -- memory ------------------------------------------------------------------------------

    def _settle_if_tight(self, blocks: int) -> None:
        """Block counts of decoding sequences lag; bring them up to date before they matter."""
        cache = self.cache
        if cache.held + cache.cached + self._unsettled + blocks > cache.total:
            self._settle()

    def _settle(self) -> None:
        """Decoding sequences hold what they have computed and their next token's block."""
        if self._unsettled:
            for sequence in self.running:
                if sequence.finish_step != NEVER:
                    self._hold_up_to(sequence, self._next_context(sequence))
            self._unsettled = 0

    def _next_context(self, sequence: Sequence) -> int:
        """Tokens of a decoding sequence once its next one is computed."""
        return sequence.target + self.steps - sequence.start_step + 1

    def _make_room(self) -> None:
        """Preempt the newest sequences until every decoding one can grow by a token."""
        cache = self.cache
        if cache.held + self._unsettled <= cache.total:
            return
        while self._batch and not cache.fits(self._blocks_lacking()):
            self._preempt(next(reversed(self.running)))
        self._settle()

    def _blocks_lacking(self) -> int:
        blocks_for = self.cache.blocks_for
        return sum(
            blocks_for(self._next_context(sequence)) - sequence.blocks
            for sequence in self.running
            if sequence.finish_step != NEVER
        )

    def _unblock_prompts(self) -> None:
        """Started prompts must never hold one another's blocks for ever."""
        while self._prompts and self._room_for(self._prompts[0]) <= 0:
            self._preempt(next(reversed(self.running)))

    def _preempt(self, sequence: Sequence) -> None:
        """Drop a sequence's blocks; it starts again from the front of the queue."""
        self._drop(sequence)
        sequence.computed = 0
        sequence.loaded, sequence.stall_s = False, 0.0
        sequence.target = sequence.prompt_tokens + sequence.generated
        sequence.matching_tokens = sequence.target
        sequence.preemptions += 1
        self.preemptions += 1
        self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        """First in line, but behind those whose KV has come: it may wait for what they hold."""
        arrived = sum(1 for _ in takewhile(_holds_blocks, self.waiting))
        self.waiting.insert(arrived, sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence.finish_step != NEVER:
            self._stop_decoding(sequence)
            sequence.finish_step = NEVER
            self._hold_up_to(sequence, sequence.computed)
        else:
            self._prompts.remove(sequence)
        del self.running[sequence]
        self.cache.release(sequence.key, sequence.blocks, sequence.computed)
        sequence.blocks = 0

    def _steps_that_fit(self, steps: int) -> int:
        """How many of ``steps`` surely find blocks; at least one, which ``_make_room`` saw to."""
        cache, batch = self.cache, self._batch
        grown = self._unsettled + batch * (steps // cache.block_tokens + 1)
        if cache.held + grown <= cache.total:
            return steps
        self._settle()
        rounds = (cache.total - cache.held) // batch
        return max(1, min(steps, rounds * cache.block_tokens + 1))


def _holds_blocks(sequence: Sequence) -> bool:
    return sequence.blocks > 0
