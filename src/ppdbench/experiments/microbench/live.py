"""Runs a script on a real engine over HTTP and keeps every token's instant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError
from ppdbench.core.seeds import rng_for
from ppdbench.experiments.microbench.script import Ask, Script, Segment
from ppdbench.http.client import Exchange, Pool
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Head, Origin, Request
from ppdbench.http.reply import Reply
from ppdbench.runs.records import TurnRecord

TOKEN_IDS = range(300, 3900)
"""Ordinary tokens in the vocabulary of every model in use; special ones stand at either end."""

BLOCK_LIMIT_S = 300.0


class LiveEngine:
    """One OpenAI-compatible server. ``headers`` carry its key, if it has one."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        seed: int,
        node: str = "r0",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.origin = Origin.parse(url)
        self.model = model
        self.node = node
        self.pool = Pool()
        self._seed = seed
        self._headers = tuple(
            (name.lower().encode(), value.encode()) for name, value in (headers or {}).items()
        )

    def __repr__(self) -> str:
        return f"<LiveEngine {self.origin} {self.model}>"

    async def close(self) -> None:
        await self.pool.close()

    async def run(self, script: Script) -> list[TurnRecord]:
        """Play ``script`` to its end; the records are in the order of sending.

        Raises:
            EngineError: a request failed, or nothing ended within :data:`BLOCK_LIMIT_S`.
        """
        play = _Play(self, script)
        try:
            async with asyncio.timeout(BLOCK_LIMIT_S):
                return await play.to_end()
        except TimeoutError:
            raise EngineError(
                f"{self.origin}: the block did not end in {BLOCK_LIMIT_S:g} s; is the engine "
                "stuck, or the batch too large for it? Try a smaller --batch"
            ) from None
        finally:
            play.stop()

    def request(self, ask: Ask) -> Request:
        """The completion request for ``ask``, streamed, of exact lengths."""
        return Request.json("/v1/completions", self.body(ask), self._headers)

    def body(self, ask: Ask) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": token_ids(ask.prompt, self._seed),
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


def token_ids(prompt: Iterable[Segment], seed: int) -> list[int]:
    """Segments spelled out; equal names give equal tokens under one seed."""
    ids: list[int] = []
    for segment in prompt:
        draws = rng_for(seed, "tokens", segment.name).integers(
            TOKEN_IDS.start, TOKEN_IDS.stop, segment.tokens
        )
        ids += draws.tolist()
    return ids


class _Play:
    """A script under way. Instants count from its start."""

    def __init__(self, engine: LiveEngine, script: Script) -> None:
        self._engine = engine
        self._script = script
        self._from_s = time.monotonic()
        self._streams: list[_Stream] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._ended = asyncio.get_running_loop().create_future()

    async def to_end(self) -> list[TurnRecord]:
        self._send(self._script.begin())
        await self._ended
        return [stream.record(self._from_s) for stream in self._streams]

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for stream in self._streams:
            stream.stop()

    def progressed(self) -> None:
        """A victim has a new token."""
        running = [s.tokens for s in self._streams if s.ask.paces and not s.finished]
        if running:
            self._send(self._script.progressed(min(running)))
        self._end_if_done()

    def ended(self, stream: _Stream) -> None:
        self._send(self._script.ended(stream.ask.name))
        self._end_if_done()

    def failed(self, message: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(EngineError(message))

    def _end_if_done(self) -> None:
        if self._script.done and not self._ended.done():
            self._ended.set_result(None)

    def _send(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            if ask.delay_s:
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_later(ask.delay_s, self._start, ask))
            else:
                self._start(ask)

    def _start(self, ask: Ask) -> None:
        stream = _Stream(ask, self, self._engine.node)
        self._streams.append(stream)
        stream.exchange = self._engine.pool.start(
            self._engine.origin, self._engine.request(ask), stream
        )


class _Stream:
    """One request's answer as it comes in."""

    def __init__(self, ask: Ask, play: _Play, node: str) -> None:
        self.ask = ask
        self.finished = False
        self.exchange: Exchange | None = None
        self._play = play
        self._node = node
        self._reply = Reply()
        self._status = 200
        self._stopped = False
        self._refusal: list[bytes] = []
        self._begun_s = time.monotonic()

    @property
    def tokens(self) -> int:
        return len(self._reply.token_at_s)

    def stop(self) -> None:
        self._stopped = True
        if self.exchange is not None:
            self.exchange.cancel()

    def record(self, from_s: float) -> TurnRecord:
        """What happened, as a turn record; a victim that was stopped is a good one."""
        reply = self._reply
        sent_s = self._begun_s if self.exchange is None else self.exchange.sent_at_s
        instants = [at_s - from_s for at_s in reply.token_at_s]
        return TurnRecord(
            self.ask.name,
            1,
            Route.REPLICA,
            self._node,
            scheduled_at_s=self._begun_s - from_s,
            sent_at_s=(sent_s or self._begun_s) - from_s,
            first_token_at_s=instants[0] if instants else None,
            finished_at_s=instants[-1] if instants else None,
            new_tokens=self.ask.prompt_tokens,
            wanted_output_tokens=self.ask.output_tokens,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            output_tokens=len(instants),
            token_at_s=instants,
        )

    def on_head(self, head: Head, at_s: float) -> None:  # noqa: ARG002
        self._status = head.status

    def on_body(self, data: bytes, at_s: float) -> None:
        if self._status != 200:
            self._refusal.append(data)
            return
        before = self.tokens
        self._reply.feed(data, at_s)
        if self._reply.error:
            self._play.failed(f"{self._node}: {self._reply.error}")
        elif self.ask.paces and self.tokens > before and not self._stopped:
            self._play.progressed()

    def on_end(self, at_s: float) -> None:  # noqa: ARG002
        self.finished = True
        if self._status != 200:
            text = b"".join(self._refusal)[:300].decode(errors="replace")
            self._play.failed(f"{self._node} refused {self.ask.name} with {self._status}: {text}")
        elif not self._reply.ended:
            self._play.failed(f"{self._node} broke off {self.ask.name} without an end")
        else:
            self._play.ended(self)

    def on_failure(self, error: HttpError, at_s: float) -> None:  # noqa: ARG002
        self.finished = True
        if not self._stopped:
            self._play.failed(f"{self._node}, {self.ask.name}: {error}")
