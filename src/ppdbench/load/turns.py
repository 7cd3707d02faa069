"""Turns over HTTP: the routes of one turn, executed and recorded.

Everything is callbacks on one event loop; no task and no timer per turn. Deadlines are looked at
by :meth:`HttpTurns.watch`, which the driver calls now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import orjson

from ppdbench.cluster import nixl
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.link import SlowLink
from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError
from ppdbench.http.client import Exchange, Pool
from ppdbench.http.errors import CancelledExchangeError, ConnectError, HttpError
from ppdbench.http.messages import Head, Headers, Origin, Request
from ppdbench.http.reply import Reply
from ppdbench.load.clock import WallClock
from ppdbench.load.conversation import Dialogue
from ppdbench.load.driver import Done
from ppdbench.load.hand_offs import HandOffGate
from ppdbench.load.history import History, history_for
from ppdbench.runs.records import Outcome, TurnRecord


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How turns are asked for.

    ``exact_lengths`` asks for as many tokens as planned, end-of-text or not (``ignore_eos`` and
    ``min_tokens``). ``recorded_replies`` puts the workload's replies into the history instead of
    the model's. ``vocabulary`` bounds ids drawn for workloads without content. ``extra`` goes
    into every body. With ``for_pulls`` each turn that another follows is asked for whole: vLLM
    names D's KV, which a pull needs, on unstreamed answers alone. A ``slow_link`` makes D's request
    of each hand-off wait. At most ``max_hand_offs`` are out per P; a turn above that waits, which
    counts in its TTFT.
    """

    model: str
    first_byte_timeout_s: float = 120.0
    turn_timeout_s: float = 600.0
    exact_lengths: bool = True
    recorded_replies: bool = False
    vocabulary: int = 4000
    keep_token_instants: bool = True
    for_pulls: bool = False
    slow_link: SlowLink | None = None
    max_hand_offs: int | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Memory:
    """What the client keeps of a conversation between its turns."""

    history: History
    held: nixl.HeldKv | None = None
    home_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Address:
    origin: Origin
    headers: Headers
    pool: Pool


class HttpTurns:
    """A :class:`~ppdbench.load.driver.TurnServer` over a cluster's nodes.

    ``salt`` keeps this point's KV apart from everything that was cached before. ``seed`` draws
    the content of workloads that have none.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        clock: WallClock,
        settings: TurnSettings,
        *,
        salt: str,
        seed: int,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self._salt = salt
        self._seed = seed
        self._pools: dict[str | None, Pool] = {}
        self._hand_off_homes = [n.name for n in cluster.nodes if n.role.needs_prefill_node]
        self._addresses = {node.name: self._address(node) for node in cluster.nodes}
        self._memories: dict[str, _Memory] = {}
        self._running: Counter[str] = Counter()
        self._outstanding: Counter[str] = Counter()
        self._flights: set[_Flight] = set()
        self.hand_offs = HandOffGate(settings.max_hand_offs)
        self.send_lags_s: list[float] = []

    def __repr__(self) -> str:
        return f"<HttpTurns {len(self._flights)} turns out, {len(self._memories)} conversations>"

    @property
    def turns_out(self) -> int:
        return len(self._flights)

    def running(self, node: str) -> int | None:
        return self._running[node]

    def outstanding(self, node: str) -> float:
        return self._outstanding[node]

    async def warm(self, connections: int) -> None:
        """Open connections to every node, so that Turn 1 pays for none."""
        for address in self._addresses.values():
            await address.pool.warm(address.origin, connections)

    async def close(self) -> None:
        for flight in tuple(self._flights):
            flight.give_up(Outcome.CANCELLED, "the point was stopped")
        for pool in self._pools.values():
            await pool.close()

    def watch(self) -> None:
        """End the turns that are over their time."""
        now_s = self.clock.now_s
        for flight in tuple(self._flights):
            flight.check_time(now_s)

    # TurnServer

    def serve(self, dialogue: Dialogue, record: TurnRecord, done: Done) -> None:
        memory = self._memories.get(record.conversation)
        if memory is None:
            history = history_for(
                dialogue.conversation,
                self._seed,
                self.settings.vocabulary,
                recorded_replies=self.settings.recorded_replies,
            )
            memory = self._memories[record.conversation] = _Memory(history)
        flight = _Flight(self, dialogue, record, memory, done)
        self._flights.add(flight)
        self._running[record.node] += 1
        flight.launch()
        # After the request has been built and handed over: a long prompt's making is our lag too.
        self.send_lags_s.append(self.clock.now_s - record.scheduled_at_s)

    # for flights

    def body(self, memory: _Memory, dialogue: Dialogue, record: TurnRecord) -> dict[str, Any]:
        """The client's request, before any hand-off fields."""
        body = {
            "model": self.settings.model,
            **memory.history.ask(record.turn, dialogue.plan),
            "max_tokens": record.wanted_output_tokens,
            "temperature": 0,
            "stream": not record.whole,
            "cache_salt": self._salt,
        }
        if not record.whole:
            body["stream_options"] = {"include_usage": True}
        if self.settings.exact_lengths:
            body |= {"min_tokens": record.wanted_output_tokens, "ignore_eos": True}
        if self.settings.extra:
            body |= self.settings.extra
        return body

    def post(self, node: str, path: str, body: Mapping[str, Any], flight: _Flight) -> Exchange:
        address = self._addresses[node]
        name = f"{flight.record.conversation}/{flight.record.turn}"
        headers = (*address.headers, (b"x-ppd-turn", quote(name).encode()))
        return address.pool.start(address.origin, Request.json(path, body, headers), flight)

    def release(self, prefilled: nixl.Prefilled, refused_by: str | None) -> None:
        """Let a D, another than the one that is gone, free what P holds; else P's lease does it."""
        for name in self._hand_off_homes:
            if name != refused_by:
                address = self._addresses[name]
                request = Request.json(
                    "/v1/completions", nixl.release_body(prefilled), address.headers
                )
                address.pool.start(address.origin, request, _Unheard())
                return

    def prefilling(self, node: str, tokens: int) -> None:
        self._outstanding[node] += tokens

    def landed(self, flight: _Flight) -> None:
        """Book a finished flight out and drop what no later turn needs."""
        self._flights.discard(flight)
        record = flight.record
        self._running[record.node] -= 1
        if not record.ok or record.turn == len(flight.dialogue.conversation.turns):
            self._memories.pop(record.conversation, None)

    def _address(self, node: Node) -> _Address:
        headers = tuple(
            (name.lower().encode(), value.encode()) for name, value in node.headers().items()
        )
        pool = self._pools.get(node.ca_file)
        if pool is None:
            tls = node.tls() if node.ca_file else None
            pool = self._pools[node.ca_file] = Pool(tls=tls)
        return _Address(Origin.parse(node.url), headers, pool)


class _Unheard:
    """The sink of a release: whatever is answered, nothing can be done about it."""

    def on_head(self, head: Head, at_s: float) -> None: ...

    def on_body(self, data: bytes, at_s: float) -> None: ...

    def on_end(self, at_s: float) -> None: ...

    def on_failure(self, error: HttpError, at_s: float) -> None: ...


class _Flight:
    """One turn on its way: P first if its route says so, then the home. A sink of both answers."""

    __slots__ = ("_asked_at_s", "_body", "_done", "_error_body", "_exchange", "_handing_over",
                 "_head", "_landed", "_memory", "_prefilled", "_prefilling", "_prompt_tokens",
                 "_reply", "_turns", "_whole_body", "dialogue", "record")  # fmt: skip

    def __init__(
        self,
        turns: HttpTurns,
        dialogue: Dialogue,
        record: TurnRecord,
        memory: _Memory,
        done: Done,
    ) -> None:
        self.dialogue = dialogue
        self.record = record
        self._turns = turns
        self._memory = memory
        self._done = done
        self._body: dict[str, Any] = {}
        self._head: Head | None = None
        self._error_body = b""
        self._handing_over = False
        self._prefilling = False
        self._whole_body = b""
        self._prefilled: nixl.Prefilled | None = None
        self._prompt_tokens = record.context_tokens + record.new_tokens
        self._reply = Reply()
        self._exchange: Exchange | None = None
        self._asked_at_s = 0.0
        self._landed = False

    def launch(self) -> None:
        self.record.whole = self._turns.settings.for_pulls and not self._is_last
        self._body = self._turns.body(self._memory, self.dialogue, self.record)
        if self.record.prefill_node is not None:
            self._turns.hand_offs.enter(self.record.prefill_node, self._begin_hand_off)
        else:
            self._ask_home(nixl.local_body(self._body))
            self._note_sent()

    @property
    def _is_last(self) -> bool:
        return self.record.turn == len(self.dialogue.conversation.turns)

    def check_time(self, now_s: float) -> None:
        settings, waited_s = self._turns.settings, now_s - self.record.sent_at_s
        if waited_s > settings.turn_timeout_s:
            self.give_up(Outcome.TIMEOUT, f"not finished after {waited_s:.1f} s")
        elif self._unanswered_s(now_s) > settings.first_byte_timeout_s:
            said = f"no answer after {self._unanswered_s(now_s):.1f} s"
            self.give_up(Outcome.NO_FIRST_BYTE, said)

    def _unanswered_s(self, now_s: float) -> float:
        """How long the request that is out, of two in a hand-off, has had no byte."""
        waiting = self._exchange is not None and self._head is None
        return now_s - self._asked_at_s if waiting else 0.0

    def give_up(self, outcome: Outcome, error: str) -> None:
        """Close the connection, so that the engine stops, and record why."""
        exchange, self._exchange = self._exchange, None
        if exchange is None and self._prefilled is not None:
            self._turns.release(self._prefilled, refused_by=None)
        self._land(outcome, error)
        if exchange is not None:
            exchange.cancel()

    # Sink

    def on_head(self, head: Head, at_s: float) -> None:  # noqa: ARG002
        self._head = head
        if self._prefilled is None:
            self._note_sent()

    def on_body(self, data: bytes, at_s: float) -> None:
        assert self._head is not None
        if self._handing_over and not self._prefilling:
            self._leave_hand_off()
        if self._head.status != 200:
            self._error_body += data
        elif self._prefilling or self.record.whole:
            self._whole_body += data
        else:
            self._reply.feed(data, at_s)

    def on_end(self, at_s: float) -> None:
        """A bug of ours ends the point: the loop alone would log it and the turn never end."""
        try:
            self._end(at_s)
        except Exception as error:
            if self._turns.clock.on_error is None:
                raise
            self._turns.clock.on_error(error)

    def _end(self, at_s: float) -> None:
        assert self._head is not None
        if self._head.status != 200:
            self._land(Outcome.UPSTREAM_STATUS, self._status_text())
        elif self._prefilling:
            self._end_prefill()
        else:
            if self.record.whole:
                self._reply.feed_whole(self._whole_body, at_s)
            self._end_reply()

    def on_failure(self, error: HttpError, at_s: float) -> None:  # noqa: ARG002
        if isinstance(error, CancelledExchangeError):
            return
        if isinstance(error, ConnectError):
            outcome = Outcome.REFUSED
            if self._prefilled is not None:
                self._turns.release(self._prefilled, self.record.node)
        else:
            outcome = Outcome.BROKEN_STREAM if error.got_bytes else Outcome.NO_FIRST_BYTE
        self._land(outcome, str(error))

    # stages

    def _note_sent(self) -> None:
        """The first request's instant; on a new connection it comes after the connecting."""
        if self._exchange is not None and self._exchange.sent_at_s is not None:
            self.record.sent_at_s = self._on_clock(self._exchange.sent_at_s)

    def _begin_hand_off(self) -> bool:
        if self._landed:
            return False
        assert self.record.prefill_node is not None
        self._handing_over = True
        self._ask_prefill(self.record.prefill_node)
        self._note_sent()
        return True

    def _leave_hand_off(self) -> None:
        if self._handing_over:
            self._handing_over = False
            assert self.record.prefill_node is not None
            self._turns.hand_offs.leave(self.record.prefill_node)

    def _ask_prefill(self, node: str) -> None:
        self._prefilling = True
        self._turns.prefilling(node, self._prompt_tokens)
        pull_from = self._pull_source()
        body = nixl.prefill_body(self._body, pull_from)
        self._post(node, body)

    def _pull_source(self) -> nixl.HeldKv | None:
        """The KV to pull, if that is the route and safe; else the turn is a plain remote one."""
        if self.record.route is not Route.PULL:
            return None
        refusal = nixl.pull_refusal(self._memory.held, self._memory.history.ids)
        if refusal is None:
            return self._memory.held
        self.record.route, self.record.reason = Route.REMOTE, f"pull refused: {refusal}"
        return None

    def _end_prefill(self) -> None:
        self._leave_prefill()
        try:
            prefilled = nixl.read_prefilled(orjson.loads(self._whole_body))
        except (EngineError, ValueError) as error:
            self._land(Outcome.UPSTREAM_STATUS, str(error))
            return
        self._prefilled = prefilled
        self._whole_body = b""
        self._head = None
        self._exchange = None
        self._after_the_link(prefilled)

    def _after_the_link(self, prefilled: nixl.Prefilled) -> None:
        link, clock = self._turns.settings.slow_link, self._turns.clock
        if link is None:
            self._hand_over(prefilled)
            return
        delay_s = link.delay_s(self._prompt_tokens, self._memory.home_tokens)
        clock.at(clock.now_s + delay_s, self._hand_over, prefilled)

    def _hand_over(self, prefilled: nixl.Prefilled) -> None:
        if not self._landed:
            self._ask_home(nixl.decode_body(self._body, prefilled))

    def _leave_prefill(self) -> None:
        if self._prefilling:
            self._prefilling = False
            assert self.record.prefill_node is not None
            self._turns.prefilling(self.record.prefill_node, -self._prompt_tokens)

    def _ask_home(self, body: Mapping[str, Any]) -> None:
        self._post(self.record.node, body)
        self._body = {}

    def _post(self, node: str, body: Mapping[str, Any]) -> None:
        self._asked_at_s = self._turns.clock.now_s
        self._exchange = self._turns.post(node, self._memory.history.path, body, self)

    def _end_reply(self) -> None:
        reply = self._reply
        if not reply.ended:
            self._land(Outcome.BROKEN_STREAM, reply.error or "the stream ended without [DONE]")
            return
        record = self.record
        wrong = self._turns.settings.exact_lengths and (
            reply.output_tokens != record.wanted_output_tokens
        )
        if wrong or reply.first_token_at_s is None:
            text = f"{reply.output_tokens} tokens instead of {record.wanted_output_tokens}"
            self._land(Outcome.WRONG_LENGTH, text)
            return
        self._memory.home_tokens = (reply.prompt_tokens or 0) + reply.output_tokens - 1
        unfit = "" if self._is_last else self._hear()
        self._land(Outcome.BROKEN_STREAM if unfit else Outcome.OK, unfit)

    def _hear(self) -> str:
        """Take the reply into the history."""
        unfit = self._memory.history.hear(self._reply)
        ids = self._memory.history.ids
        if ids is not None and self._reply.kv_transfer_params:
            answer = {nixl.PARAMS: self._reply.kv_transfer_params}
            self._memory.held = nixl.held_kv(answer, ids, ())
        return unfit

    def _land(self, outcome: Outcome, error: str) -> None:
        self._landed = True
        self._leave_prefill()
        self._leave_hand_off()
        self._exchange = None
        self._fill_record(outcome, error)
        self._turns.landed(self)
        self._done(self.dialogue, self.record)

    def _fill_record(self, outcome: Outcome, error: str) -> None:
        record, reply = self.record, self._reply
        record.outcome, record.error = outcome, error
        self._fill_counts()
        if record.whole:
            record.finished_at_s = self._turns.clock.now_s
        elif reply.first_token_at_s is not None and reply.last_token_at_s is not None:
            record.first_token_at_s = self._on_clock(reply.first_token_at_s)
            record.finished_at_s = self._on_clock(reply.last_token_at_s)
        else:
            record.finished_at_s = self._turns.clock.now_s
        if self._turns.settings.keep_token_instants and record.ok and not record.whole:
            start_s = self._turns.clock.start_s
            record.token_at_s = [at_s - start_s for at_s in reply.exact_token_at_s]

    def _fill_counts(self) -> None:
        """A turn through P has P's cache hits: what D found after the hand-off says nothing."""
        record, reply = self.record, self._reply
        record.prompt_tokens = reply.prompt_tokens
        record.cached_tokens = reply.cached_tokens
        if self._prefilled is not None:
            record.cached_tokens = self._prefilled.cached_tokens
        if reply.first_token_at_s is not None:
            record.output_tokens = reply.output_tokens
            record.counts_estimated = reply.counts_estimated
        effective = record.effective_new_tokens
        if effective is not None:
            record.recomputed_tokens = max(0, effective - record.new_tokens)

    def _status_text(self) -> str:
        assert self._head is not None
        try:
            document = orjson.loads(self._error_body)
            message = document.get("error", document)
            message = message.get("message", message) if isinstance(message, dict) else message
        except (ValueError, AttributeError):
            message = self._error_body[:200].decode(errors="replace")
        where = self.record.prefill_node if self._prefilling else self.record.node
        return f"{where} answered {self._head.status}: {message}"

    def _on_clock(self, monotonic_s: float) -> float:
        return monotonic_s - self._turns.clock.start_s
