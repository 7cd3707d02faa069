"""FakeEngine: an OpenAI-compatible server that does what it is told and remembers what it did.

Known tokens, scripted service times behind a number of slots, faults on request, a block-wise
prefix cache, vLLM's hand-off fields and metric names. It does not compute anything, so whatever a
client measures above the script is the client's own doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from ppdbench.http.client import Pool
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Origin, Request
from ppdbench.http.server import Incoming, Responder
from ppdbench.testing import tokens
from ppdbench.testing.cache import PrefixCache
from ppdbench.testing.openai import Answer, Generation, OpenAiShell

BYTES_PER_TOKEN = 1024


@dataclass(frozen=True, slots=True)
class Service:
    """Times of one request once it has a slot: the first token, then each further one."""

    first_token_s: float = 0.0
    per_token_s: float = 0.0


class FaultKind(StrEnum):
    """What goes wrong. The last four happen after ``Fault.after_tokens`` tokens."""

    STATUS = "status"
    CLOSE = "close"
    HANG = "hang"
    BREAK = "break"
    END_SILENTLY = "end_silently"
    STOP_SHORT = "stop_short"
    ERROR_EVENT = "error_event"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one request. ``status`` is the answer of ``STATUS``."""

    kind: FaultKind
    after_tokens: int = 0
    status: int = 500


@dataclass(slots=True)
class Served:
    """What the engine did for one generation: the truth a client's figures are held against."""

    id: str
    received_at_s: float
    prompt_tokens: int
    cached_tokens: int
    sent_at_s: list[float]
    token_ids: list[int]
    cancelled: bool = False


Script = Callable[[Generation], Service]
Faults = Callable[[Generation], Fault | None]


@dataclass(slots=True, eq=False)
class _Job:
    generation: Generation
    answer: Answer
    fault: Fault | None
    reply: list[int]
    timer: asyncio.TimerHandle | None = None
    pulling: asyncio.Task[None] | None = None
    next_at_s: float = 0.0
    next_token: int = 0
    per_token_s: float = 0.0
    in_slot: bool = False


class FakeEngine:
    """See the module. Use as an async context manager, then ``url``.

    ``slots`` limits concurrent service; further requests queue in order. ``block_size`` 0 turns
    the prefix cache off. ``honest_handoff=False`` makes a D that ignores the hand-off and
    computes the prompt itself. ``keep_log=False`` keeps memory flat in long runs.
    """

    def __init__(  # noqa: PLR0913  (each one is a script's own dial)
        self,
        *,
        model: str = "fake",
        service: Service | Script = Service(),
        faults: Faults | None = None,
        slots: int | None = None,
        tokens_per_chunk: int = 1,
        block_size: int = 16,
        max_model_len: int = 131_072,
        honest_handoff: bool = True,
        keep_log: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.served: list[Served] = []
        self.cancelled = 0
        self.held: dict[str, int] = {}
        self._script: Script = service if callable(service) else lambda _: service
        self._faults = faults
        self._slots = slots
        self._tokens_per_chunk = tokens_per_chunk
        self._honest_handoff = honest_handoff
        self._keep_log = keep_log
        self._cache = PrefixCache(block_size)
        self._jobs: dict[Generation, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._in_service = 0
        self._counters: dict[str, float] = dict.fromkeys(
            ("local_compute", "local_cache_hit", "external_kv_transfer", "bytes", "transfers",
             "transfer_s", "failed_transfers", "prompt", "generated", "finished"), 0
        )  # fmt: skip
        self._shell = OpenAiShell(self, host=host, port=port, routes={"/fake/take": self._give_kv})
        self._pool = Pool()
        self._releases: set[asyncio.Task[int]] = set()

    def __repr__(self) -> str:
        return f"<FakeEngine {self.model} {self._in_service} running {len(self._waiting)} waiting>"

    @property
    def url(self) -> str:
        return self._shell.url

    @property
    def running(self) -> int:
        return self._in_service

    async def start(self) -> None:
        await self._shell.start()

    async def close(self) -> None:
        """Stop at once; what is under way breaks."""
        for job in tuple(self._jobs.values()):
            _stop(job)
        for task in self._releases:
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
        """Take a request: fail it as told, or queue it for a slot."""
        fault = self._faults(generation) if self._faults else None
        if fault is not None and self._fail_at_once(fault, answer):
            return
        wanted = fault.after_tokens if fault and fault.kind is FaultKind.STOP_SHORT else None
        count = generation.max_tokens if wanted is None else wanted
        job = _Job(generation, answer, fault, tokens.reply_ids(generation.prompt, count))
        self._jobs[generation] = job
        if self._slots is not None and self._in_service >= self._slots:
            self._waiting.append(job)
        else:
            self._serve(job)

    def cancel(self, generation: Generation) -> None:
        """The client has left: free the slot."""
        self.cancelled += 1
        job = self._jobs.get(generation)
        if job is not None:
            self._close(job, cancelled=True)

    def refused(self, kv_transfer_params: dict[str, Any] | None) -> None:
        """As vLLM's connector does, tell P that nobody will come for its blocks."""
        if kv_transfer_params and kv_transfer_params.get("do_remote_prefill"):
            task = asyncio.get_running_loop().create_task(self._take_kv(kv_transfer_params))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def reset_prefix_cache(self) -> bool:
        """Forget everything; refused while requests run, as vLLM does."""
        if self._jobs:
            return False
        self._cache.clear()
        return True

    def metrics(self) -> str:
        """Prometheus text."""
        name = f'model_name="{self.model}",engine="0"'
        count = self._counters
        lines = [
            f"vllm:num_requests_running{{{name}}} {self._in_service}",
            f"vllm:num_requests_waiting{{{name}}} {len(self._waiting)}",
            f"vllm:kv_cache_usage_perc{{{name}}} {self._cache.blocks / 1e6}",
            f'vllm:cache_config_info{{{name},block_size="{self._cache.block_size}"}} 1',
            f"vllm:num_preemptions_total{{{name}}} 0",
            f"vllm:prompt_tokens_total{{{name}}} {count['prompt']}",
            f"vllm:generation_tokens_total{{{name}}} {count['generated']}",
            f'vllm:request_success_total{{{name},finished_reason="length"}} {count["finished"]}',
            f"vllm:nixl_bytes_transferred_sum{{{name}}} {count['bytes']}",
            f"vllm:nixl_bytes_transferred_count{{{name}}} {count['transfers']}",
            f"vllm:nixl_xfer_time_seconds_sum{{{name}}} {count['transfer_s']}",
            f"vllm:nixl_xfer_time_seconds_count{{{name}}} {count['transfers']}",
            f"vllm:nixl_num_failed_transfers_total{{{name}}} {count['failed_transfers']}",
            f"vllm:nixl_num_kv_expired_reqs_total{{{name}}} 0",
            *(
                f'vllm:prompt_tokens_by_source_total{{{name},source="{source}"}} {count[source]}'
                for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
            ),
        ]
        return "\n".join(lines) + "\n"

    # service

    def _fail_at_once(self, fault: Fault, answer: Answer) -> bool:
        if fault.kind is FaultKind.STATUS:
            answer.refuse(fault.status, "scripted failure", "InternalServerError")
        elif fault.kind is FaultKind.CLOSE:
            answer.abort()
        else:
            return fault.kind is FaultKind.HANG
        return True

    def _serve(self, job: _Job) -> None:
        job.in_slot = True
        self._in_service += 1
        params = job.generation.kv_transfer_params or {}
        if self._honest_handoff and params.get("remote_engine_id"):
            job.pulling = asyncio.get_running_loop().create_task(self._pull_then_run(job, params))
        else:
            self._run(job, 0)

    async def _pull_then_run(self, job: _Job, params: dict[str, Any]) -> None:
        begin_s = time.monotonic()
        held = await self._take_kv(params)
        self._counters["transfer_s"] += time.monotonic() - begin_s
        job.pulling = None
        self._run(job, held)

    def _run(self, job: _Job, offered_tokens: int) -> None:
        self._account_prompt(job.generation, offered_tokens)
        service = self._script(job.generation)
        job.per_token_s = service.per_token_s
        if service.first_token_s <= 0 and service.per_token_s <= 0:
            self._emit_all(job)
            return
        loop = asyncio.get_running_loop()
        job.next_at_s = loop.time() + service.first_token_s
        job.timer = loop.call_at(job.next_at_s, self._emit_next, job)

    def _account_prompt(self, generation: Generation, offered_tokens: int) -> None:
        """Split the prompt into cached, pulled and computed tokens, as vLLM's counters do."""
        total = len(generation.prompt)
        hit = self._cache.match(generation.prompt, generation.cache_salt)
        pulled = max(0, min(offered_tokens, total - 1) - hit)
        self._counters["local_cache_hit"] += hit
        self._counters["external_kv_transfer"] += pulled
        self._counters["local_compute"] += total - hit - pulled
        self._counters["prompt"] += total
        if pulled:
            self._counters["bytes"] += pulled * BYTES_PER_TOKEN
            self._counters["transfers"] += 1
        remote = (generation.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
        generation.cached_tokens = remote if isinstance(remote, int) else hit + pulled

    def _emit_all(self, job: _Job) -> None:
        while not job.answer.closed and self._emit(job):
            pass

    def _emit_next(self, job: _Job) -> None:
        """Send what is due. Late timers do not delay the tokens after them."""
        if self._emit(job):
            loop = asyncio.get_running_loop()
            job.next_at_s += job.per_token_s * self._tokens_per_chunk
            job.timer = loop.call_at(job.next_at_s, self._emit_next, job)

    def _emit(self, job: _Job) -> bool:
        """Send one chunk; whether more is to come."""
        if self._fault_is_due(job):
            return False
        chunk = job.reply[job.next_token : job.next_token + self._tokens_per_chunk]
        if chunk:
            job.answer.token(chunk)
            job.next_token += len(chunk)
        if job.next_token < len(job.reply):
            return True
        if not self._fault_is_due(job):
            self._finish(job)
        return False

    def _fault_is_due(self, job: _Job) -> bool:
        fault = job.fault
        if fault is None or job.next_token < fault.after_tokens:
            return False
        if fault.kind is FaultKind.BREAK:
            job.answer.abort()
        elif fault.kind is FaultKind.END_SILENTLY:
            job.answer.finish_silently()
        elif fault.kind is FaultKind.ERROR_EVENT:
            job.answer.refuse(500, "scripted failure", "InternalServerError")
        else:
            return False
        self._close(job)
        return True

    def _finish(self, job: _Job) -> None:
        generation = job.generation
        self._counters["finished"] += 1
        self._cache.store([*generation.prompt, *job.reply], generation.cache_salt)
        reason = "stop" if job.fault else "length"
        job.answer.finish(reason, self._offer(job))
        self._close(job)

    def _close(self, job: _Job, *, cancelled: bool = False) -> None:
        self._jobs.pop(job.generation, None)
        _stop(job)
        self._counters["generated"] += job.next_token
        if self._keep_log:
            self.served.append(_served(job, cancelled=cancelled))
        if job.in_slot:
            self._in_service -= 1
            self._serve_waiting()
        else:
            with contextlib.suppress(ValueError):
                self._waiting.remove(job)

    def _serve_waiting(self) -> None:
        if self._waiting and self._slots is not None and self._in_service < self._slots:
            self._serve(self._waiting.popleft())

    # hand-off

    def _offer(self, job: _Job) -> dict[str, Any] | None:
        """What another node may pull after this request, as vLLM's NIXL connector says it."""
        params = job.generation.kv_transfer_params
        if params is None or not self._honest_handoff:
            return None
        prefills = bool(params.get("do_remote_decode"))
        held = len(job.generation.prompt) + (0 if prefills else len(job.reply) - 1)
        self.held[job.generation.id] = held
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

    def _give_kv(self, incoming: Incoming, responder: Responder) -> None:
        """Another node takes what was offered: once."""
        held = self.held.pop(incoming.body.decode("utf-8", "replace"), None)
        responder.send_json(404 if held is None else 200, {"tokens": held or 0})

    async def _take_kv(self, params: dict[str, Any]) -> int:
        """Tokens that the other node gave; 0 when it no longer holds them.

        As in vLLM, parameters that name no request of a node are no transfer.
        """
        try:
            origin = Origin("http", str(params["remote_host"]), int(params["remote_port"]))
            body = str(params["remote_request_id"]).encode()
        except (KeyError, TypeError, ValueError):
            return 0
        try:
            response = await self._pool.fetch(origin, Request("POST", "/fake/take", (), body))
        except HttpError:
            response = None
        if response is None or not response.ok:
            self._counters["failed_transfers"] += 1
            return 0
        return int(response.json()["tokens"])


def _stop(job: _Job) -> None:
    if job.timer is not None:
        job.timer.cancel()
    if job.pulling is not None:
        job.pulling.cancel()


def _served(job: _Job, *, cancelled: bool) -> Served:
    return Served(
        job.generation.id,
        job.generation.received_at_s,
        len(job.generation.prompt),
        job.generation.cached_tokens or 0,
        job.answer.sent_at_s,
        list(job.reply[: job.next_token]),
        cancelled,
    )


def every(count: int, fault: Fault, *, of: Sequence[int] = (0,)) -> Faults:
    """``fault`` for each generation whose index modulo ``count`` is in ``of``."""
    return lambda generation: fault if generation.index % count in of else None
