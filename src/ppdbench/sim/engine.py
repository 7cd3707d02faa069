"""A simulated node in real time: the cost model's steps on the wall clock, behind vLLM's API.

The node runs on a :class:`Kernel` whose time is the wall clock's. Each step is an event; when it
is due, every request that got a token in it is sent one. A P keeps the blocks of a hand-off until
D has taken them or the lease has run out; D waits as long as the link would need.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self

from ppdbench.core.topology import Role
from ppdbench.http.client import Pool
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Origin
from ppdbench.http.messages import Request as HttpRequest
from ppdbench.http.server import Incoming, Responder
from ppdbench.sim.cluster import Capacity
from ppdbench.sim.config import LINKS, SimConfig
from ppdbench.sim.content_cache import ContentCache, TokenContent
from ppdbench.sim.costs import CostTables
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Node, Sequence
from ppdbench.testing import tokens
from ppdbench.testing.openai import Answer, Generation, OpenAiShell

LEASE_S = 30.0
HOLD_FOR_PULL_S = 480.0
TAKE_PATH = "/sim/take"


class _Job:
    """One generation under way. ``content`` names its blocks; ``sent`` tokens have gone out."""

    __slots__ = ("answer", "content", "generation", "reply", "sent", "sequence", "task")

    def __init__(self, generation: Generation, answer: Answer, block_tokens: int) -> None:
        self.generation = generation
        self.answer = answer
        self.content = TokenContent(generation.prompt, block_tokens, generation.cache_salt)
        self.reply = tokens.reply_ids(generation.prompt, generation.max_tokens)
        self.sent = 0
        self.sequence: Sequence | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def params(self) -> dict[str, Any]:
        return self.generation.kv_transfer_params or {}


class SimEngine:
    """Use as an async context manager, then ``url``. Implements ``TokenEngine``."""

    def __init__(  # noqa: PLR0913 - a node is its role, its costs and its address
        self,
        role: Role,
        config: SimConfig,
        costs: CostTables,
        capacity: Capacity,
        *,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.model, self.role = model, role
        self.max_model_len = capacity.context_tokens
        self._config, self._capacity = config, capacity
        self._kernel = Kernel()
        self._cache = ContentCache(
            capacity.blocks, config.block_tokens, enabled=config.prefix_caching
        )
        self._node = Node(
            str(role),
            self._kernel,
            costs,
            self._cache,
            overheads=config.overheads,
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
            longest_stretch=1,
        )
        self._jobs: dict[Generation, _Job] = {}
        self._held: dict[str, tuple[Sequence, int]] = {}
        self._counts = dict.fromkeys(
            ("local_compute", "local_cache_hit", "external_kv_transfer", "bytes", "transfers",
             "failed_transfers", "expired", "prompt", "generated", "finished"), 0
        )  # fmt: skip
        self._shell = OpenAiShell(self, host=host, port=port, routes={TAKE_PATH: self._give})
        self._pool = Pool()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._started_s = time.monotonic()
        self._started_at_s = time.time()

    def __repr__(self) -> str:
        return f"<SimEngine {self.role} {self._node!r}>"

    @property
    def url(self) -> str:
        return self._shell.url

    async def start(self) -> None:
        await self._shell.start()

    async def close(self) -> None:
        """Stop at once; what is under way breaks."""
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await self._pool.close()
        await self._shell.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # TokenEngine

    def generate(self, generation: Generation, answer: Answer) -> None:
        job = _Job(generation, answer, self._config.block_tokens)
        needed = self._cache.blocks_for(len(generation.prompt) + generation.max_tokens)
        if needed > self._capacity.blocks:
            answer.refuse(400, f"{needed} KV blocks are needed, the node has {self._cache.total}")
            return
        self._jobs[generation] = job
        self._catch_up()
        ready_s = self._kernel.now_s + self._config.overheads.request_s
        self._kernel.at(ready_s, self._admit, job)
        self._wake_later()

    def cancel(self, generation: Generation) -> None:
        job = self._jobs.pop(generation, None)
        if job is None:
            return
        self._catch_up()
        if job.sequence is not None:
            self._drop(job, job.sequence)
        self._wake_later()

    def _drop(self, job: _Job, sequence: Sequence) -> None:
        """A fetch that has its answer ends by itself, in ``_fetched``."""
        if job.task is None:
            self._node.cancel(sequence)
        elif not job.task.done():
            job.task.cancel()
            self._node.release(sequence)

    def refused(self, kv_transfer_params: dict[str, Any] | None) -> None:
        """As vLLM's connector does, tell P that nobody will come for its blocks."""
        if kv_transfer_params and kv_transfer_params.get("do_remote_prefill"):
            self._spawn(self._take_for_nobody(kv_transfer_params))

    def reset_prefix_cache(self) -> bool:
        """Forget everything; refused while blocks are held, as vLLM does."""
        if self._cache.held:
            return False
        self._cache.clear()
        return True

    def metrics(self) -> str:
        """Prometheus text with vLLM's names."""
        name = f'model_name="{self.model}",engine="0"'
        count = self._counts
        gauges = {
            "num_requests_running": len(self._node.running),
            "num_requests_waiting": len(self._node.waiting),
            "kv_cache_usage_perc": self._cache.held / self._cache.total,
            "num_preemptions_total": self._node.preemptions,
            "prompt_tokens_total": count["prompt"],
            "generation_tokens_total": count["generated"],
            "nixl_bytes_transferred_sum": count["bytes"],
            "nixl_bytes_transferred_count": count["transfers"],
            "nixl_num_failed_transfers_total": count["failed_transfers"],
            "nixl_num_kv_expired_reqs_total": count["expired"],
        }
        lines = [f"vllm:{key}{{{name}}} {value}" for key, value in gauges.items()]
        lines += [
            f'vllm:prompt_tokens_by_source_total{{{name},source="{source}"}} {count[source]}'
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ]
        finished = f'{name},finished_reason="length"'
        lines.append(f"process_start_time_seconds {self._started_at_s}")
        lines.append(f"vllm:request_success_total{{{finished}}} {count['finished']}")
        return "\n".join(lines) + "\n"

    # time

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _catch_up(self) -> None:
        """Run every event that is due, send what it brought, and stand at the present."""
        now = self._now_s()
        self._kernel.run(now)
        self._kernel.now_s = now
        for job in tuple(self._jobs.values()):
            self._send_new(job)

    def _wake_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._kernel.next_at_s
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due_s - self._now_s()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._catch_up()
        self._wake_later()

    # service

    def _admit(self, job: _Job) -> None:
        """Make the sequence. A P holds its blocks; a D with a hand-off fetches first."""
        if job.generation not in self._jobs:
            return
        params = job.params
        fetches = bool(params.get("remote_engine_id"))
        job.sequence = Sequence(
            job.content,
            len(job.generation.prompt),
            job.generation.max_tokens,
            on_done=self._done,
            matching_tokens=len(job.generation.prompt),
            fetch=self._fetch if fetches else None,
            hold="do_remote_decode" in params and (not fetches or not job.generation.stream),
            owner=job,
        )
        self._node.submit(job.sequence)

    def _send_new(self, job: _Job) -> None:
        if job.sequence is None:
            return
        generated = self._node.generated(job.sequence)
        if job.sent == 0 and generated and job.generation.cached_tokens is None:
            self._account(job)
        if generated > job.sent:
            new = job.reply[job.sent : generated]
            job.sent = generated
            self._counts["generated"] += len(new)
            job.content.extend(new)
            job.answer.token(new)

    def _account(self, job: _Job) -> None:
        """Split the prompt into cached, fetched and computed tokens, as vLLM's counters do."""
        assert job.sequence is not None
        generation, hit = job.generation, job.sequence.cached_tokens
        total = len(generation.prompt)
        fetched = job.sequence.fetched_tokens
        self._counts["prompt"] += total
        self._counts["local_cache_hit"] += hit
        self._counts["external_kv_transfer"] += fetched
        self._counts["local_compute"] += total - hit - fetched
        told = job.params.get("remote_prefill_cached_tokens")
        generation.cached_tokens = hit + fetched if told is None else told

    def _done(self, sequence: Sequence) -> None:
        job = sequence.owner
        assert isinstance(job, _Job)
        self._send_new(job)
        self._counts["finished"] += 1
        self._jobs.pop(job.generation, None)
        job.answer.finish("length", self._offer(job) if sequence.hold else None)

    # hand-off

    def _offer(self, job: _Job) -> dict[str, Any]:
        """What another node may take, in the words of vLLM's NIXL connector."""
        assert job.sequence is not None
        prefills = bool(job.params.get("do_remote_decode"))
        held = len(job.generation.prompt) + (0 if prefills else job.generation.max_tokens - 1)
        self._held[job.generation.id] = (job.sequence, held)
        lease_s = LEASE_S if prefills else HOLD_FOR_PULL_S
        self._kernel.at(self._kernel.now_s + lease_s, self._expire, job.generation.id)
        return {
            "do_remote_prefill": prefills,
            "do_remote_decode": not prefills,
            "remote_block_ids": [[job.generation.index]],
            "remote_engine_id": self.url,
            "remote_request_id": job.generation.id,
            "remote_host": "127.0.0.1",
            "remote_port": self._shell.port,
            "remote_num_tokens": held,
            "remote_prefill_cached_tokens": job.generation.cached_tokens if prefills else None,
            "tp_size": 1,
        }

    def _expire(self, request_id: str) -> None:
        if request_id in self._held:
            self._counts["expired"] += 1
            self._release(request_id)

    def _release(self, request_id: str) -> int:
        sequence, held = self._held.pop(request_id, (None, 0))
        if sequence is not None:
            self._node.release(sequence)
        return held

    def _give(self, incoming: Incoming, responder: Responder) -> None:
        """Another node has taken what was offered: once."""
        self._catch_up()
        held = self._release(incoming.body.decode())
        responder.send_json(200 if held else 404, {"tokens": held})
        self._wake_later()

    def _fetch(self, sequence: Sequence) -> None:
        job = sequence.owner
        assert isinstance(job, _Job)
        job.task = self._spawn(self._fetch_from_peer(job, sequence))

    async def _fetch_from_peer(self, job: _Job, sequence: Sequence) -> None:
        """Ask the peer, then let the link's time pass. Without an answer the node computes all."""
        offered = await self._take(job.params)
        self._catch_up()
        hit = sequence.cached_tokens
        sequence.fetched_tokens = max(0, min(offered, sequence.prompt_tokens - 1) - hit)
        moved_bytes = sequence.fetched_tokens * self._capacity.kv_bytes_per_token
        if sequence.fetched_tokens:
            self._counts["transfers"] += 1
            self._counts["bytes"] += moved_bytes
        connector = self._config.hand_off
        seconds = connector.transfer_s + moved_bytes / LINKS[self._config.link]
        self._kernel.at(self._kernel.now_s + seconds, self._fetched, job)
        self._wake_later()

    def _fetched(self, job: _Job) -> None:
        sequence = job.sequence
        assert sequence is not None
        job.task = None
        if job.generation in self._jobs:
            self._node.kv_arrived(sequence, sequence.cached_tokens + sequence.fetched_tokens)
        else:
            self._node.release(sequence)

    async def _take(self, params: dict[str, Any]) -> int:
        """Tokens that the peer gave; 0 when it no longer holds them."""
        try:
            origin = Origin("http", str(params["remote_host"]), int(params["remote_port"]))
            body = str(params["remote_request_id"]).encode()
            response = await self._pool.fetch(origin, HttpRequest("POST", TAKE_PATH, (), body))
        except (HttpError, KeyError, TypeError, ValueError):
            response = None
        if response is None or not response.ok:
            self._counts["failed_transfers"] += 1
            return 0
        return int(response.json()["tokens"])

    async def _take_for_nobody(self, params: dict[str, Any]) -> None:
        await self._take(params)

    def _spawn(self, work: Any) -> asyncio.Task[None]:  # noqa: ANN401
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
