"""One turn on its way through: to P, to its home, back to the client. Callbacks, no task per turn.

The plan is made first, purely. Then the turn asks P if the plan says so, asks the home, and passes
the answer on. Whatever happens, it ends exactly once, in ``_finish``, which gives back every count
that it took.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec

import orjson
from msgspec import Struct
from msgspec.structs import replace

from ppdbench.cluster.nixl import (
    PARAMS,
    HeldKv,
    Prefilled,
    held_kv,
    prefill_body,
    pull_refusal,
    read_prefilled,
    release_body,
)
from ppdbench.core.decision import Decision, Route
from ppdbench.core.errors import EngineError
from ppdbench.http.client import Exchange
from ppdbench.http.errors import CancelledExchangeError, HttpError
from ppdbench.http.messages import Head, Headers
from ppdbench.http.server import Incoming, Responder
from ppdbench.router.answer import NOTHING
from ppdbench.router.choose import Chooser, NoNodeError, Plan
from ppdbench.router.config import RouterConfig
from ppdbench.router.documents import TooDeepError, drop_nested, written
from ppdbench.router.health import Health
from ppdbench.router.legs import AnswerLeg, WholeLeg
from ppdbench.router.metrics import Metrics
from ppdbench.router.nodes import Upstream
from ppdbench.router.receipts import Receipt, Receipts
from ppdbench.router.wire import (
    error_body,
    receipt_lines,
    render,
    request_lines,
    response_lines,
    spliced,
)

TEXT_FIELDS = {"/v1/completions": "text", "/v1/chat/completions": "content"}
"""The endpoints that are turns, and where their answers keep the text."""

JSON: Headers = ((b"content-type", b"application/json"),)
RETRY_SOON: Headers = (*JSON, (b"retry-after", b"1"))
SESSION_HEADER = b"x-session-id"
OVERRIDE_HEADER = b"x-ppd-force-route"
HELD_LIMIT = 1024
RECEIPTS_LIMIT = 4096
"""Rendered header lines that are kept: of a table's 1,000 cells on several nodes."""

_P = ParamSpec("_P")


@dataclass(slots=True, eq=False)
class Services:
    """What the turns of one worker share. ``clock_offset_s`` makes wall time of monotonic time.

    ``releasing`` has one object for each release of P's blocks that no home has answered yet.
    """

    config: RouterConfig
    chooser: Chooser
    health: Health
    metrics: Metrics
    receipts: Receipts
    clock_offset_s: float
    held: HeldByConversation = field(default_factory=lambda: HeldByConversation(HELD_LIMIT))
    turns: set[TurnInFlight] = field(default_factory=set)
    releasing: set[object] = field(default_factory=set)
    receipt_lines: Callable[[Decision, str], bytes] = field(
        default_factory=lambda: lru_cache(maxsize=RECEIPTS_LIMIT)(receipt_lines)
    )
    keep_authorization: bool = field(init=False)

    def __post_init__(self) -> None:
        """A client's key goes on only where neither the router nor a node has keys of its own."""
        nodes = self.config.cluster.nodes
        own = self.config.client_keys or any(node.api_key_env for node in nodes)
        self.keep_authorization = not own

    def release_begun(self) -> Callable[..., None]:
        """To be called at its end, whatever the answer says: there is nothing to be done about it.

        It does not know the exchange that knows it, or they would wait for gc.
        """
        ticket = object()
        self.releasing.add(ticket)
        return lambda *_: self.releasing.discard(ticket)


class HeldByConversation:
    """What D nodes offer to be pulled, of the last ``limit`` conversations; one worker's own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[int, HeldKv] = OrderedDict()

    def keep(self, conversation: int, held: HeldKv) -> None:
        self._held[conversation] = held
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def take(self, conversation: int) -> HeldKv | None:
        """An offer stands once."""
        return self._held.pop(conversation, None)


class BadRequestError(Exception):
    """A request that no engine could read."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as an object.

    Raises:
        BadRequestError: it is none.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the body is a JSON {type(body).__name__}, not an object")
    return body


def _ending_the_turn(
    step: Callable[Concatenate[TurnInFlight, _P], None],
) -> Callable[Concatenate[TurnInFlight, _P], None]:
    """A step that, should it fail by a fault of ours, still ends its turn; the loop logs the fault.

    Else the client would wait for ever, and the gauges keep what the turn took.
    """

    @wraps(step)
    def guarded(turn: TurnInFlight, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            step(turn, *args, **kwargs)
        except Exception:
            turn.break_off()
            raise

    return guarded


class TurnInFlight(Struct, eq=False):
    """A request, from its last byte to the last byte of its answer."""

    _services: Services
    _incoming: Incoming
    _responder: Responder
    _body: dict[str, Any] = {}  # each turn gets one of its own
    _headers: bytes = b""
    _plan: Plan | None = None
    _exchange: Exchange | None = None
    _whole: WholeLeg | None = None
    _leg: AnswerLeg | None = None
    _prefilled: Prefilled | None = None
    _pull_from: HeldKv | None = None
    _running_on: Upstream | None = None
    _took_prefill_tokens: int = 0
    _retried: bool = False
    deadline_s: float = 0.0
    decide_s: float = 0.0
    outcome: str = ""

    def __repr__(self) -> str:
        return f"<TurnInFlight {self._plan and self._plan.decision} {self.outcome or 'under way'}>"

    # the way forward

    def begin(self) -> None:
        """Plan and send."""
        # As in ``_ending_the_turn``, less a call that every turn would pay for.
        try:
            self._plan_and_send()
        except Exception:
            self.break_off()
            raise

    def _plan_and_send(self) -> None:
        services = self._services
        services.turns.add(self)
        services.metrics.in_flight.add()
        self._responder.on_gone = self._client_gone
        keep = services.keep_authorization
        self._headers = request_lines(self._incoming.headers, keep_authorization=keep)
        try:
            self._body = parse_body(self._incoming.body)
            if "vllm_xargs" in self._body and drop_nested(self._body):
                self._incoming.body = written(self._body)
            self._plan = self._make_plan()
            self._send()
        except (BadRequestError, TooDeepError) as error:
            self._refuse_body(str(error))
        except NoNodeError as error:
            self._refuse(503, str(error), "ServiceUnavailableError", "no_node")

    def overdue(self, now_s: float) -> bool:
        """Whether its phase lasts longer than it may."""
        leg = self._leg
        if leg is not None and leg.at_s:
            return now_s - leg.at_s > self._services.config.timeouts.silence_s
        return now_s > self.deadline_s

    def give_up(self) -> None:
        """End it for want of an answer, or of a client that takes it."""
        self._stop()
        leg = self._leg
        if leg is not None and leg.began and self._responder.congested:
            self._fail("the client took nothing for too long", "TimeoutError", 408, "client_gone")
            return
        self._fail("the node gave no answer in time", "TimeoutError", 504, "timeout")

    def give_up_to_end(self) -> None:
        """End it, because the router ends."""
        self._stop()
        self._fail("the router is shutting down", "ServiceUnavailableError", 503, "broken")

    def break_off(self) -> None:
        """End it, unless it has ended, because we failed."""
        if not self.outcome:
            self._stop()
            self._fail("the router failed", "InternalServerError", 500, "broken")

    def _make_plan(self) -> Plan:
        started_s = time.perf_counter()
        incoming, services = self._incoming, self._services
        now_s = incoming.received_at_s + services.clock_offset_s
        plan = services.chooser.plan(
            self._body, incoming.get(SESSION_HEADER), now_s, self._forced_route()
        )
        if plan.decision.route is Route.PULL:
            plan = self._with_pull(plan)
        self.decide_s = time.perf_counter() - started_s
        services.metrics.route(plan.decision.route, plan.decision.reason).add()
        if plan.shadow is not None and plan.shadow.route is not plan.decision.route:
            services.metrics.board.add("shadow_differs")
        return plan

    def _with_pull(self, plan: Plan) -> Plan:
        """``plan`` if P may read what D holds, else the same way without a pull, saying why."""
        held = self._services.held.take(plan.speaker.conversation)
        refusal = pull_refusal(held, token_ids(self._body))
        if refusal is not None:
            return replace(plan, decision=Decision(Route.REMOTE, f"no_pull,{refusal}"))
        self._pull_from = held
        return plan

    def _forced_route(self) -> Route | None:
        if not self._services.config.allow_override:
            return None
        wish = self._incoming.get(OVERRIDE_HEADER)
        if wish is None:
            return None
        for route in (Route.REMOTE, Route.LOCAL):
            if wish == route.encode():
                return route
        raise BadRequestError(
            f"{OVERRIDE_HEADER.decode()}: {wish!r} cannot be chosen; "
            f"use {Route.REMOTE} or {Route.LOCAL}"
        )

    def _send(self) -> None:
        plan = self._current
        self._run_on(plan.home)
        if plan.prefill is not None:
            self._ask_prefill(plan, plan.prefill)
        else:
            self._ask_home(plan, {PARAMS: None} if PARAMS in self._body else {})

    def _ask_prefill(self, plan: Plan, node: Upstream) -> None:
        body = written(prefill_body(self._body, self._pull_from))
        self._took_prefill_tokens = plan.features.context_tokens + plan.features.new_tokens
        node.prefill_tokens.add(self._took_prefill_tokens)
        self._whole = WholeLeg(self._prefill_answered, self._prefill_failed)
        self._start(node, body, self._whole, self._services.config.timeouts.prefill_s)

    def _ask_home(self, plan: Plan, extra: dict[str, Any]) -> None:
        extra, strip = self._with_usage(extra)
        body = spliced(self._incoming.body, self._body, extra)
        receipt = self._services.receipt_lines(plan.decision, plan.home.name)
        field_name = TEXT_FIELDS[self._incoming.path]
        self._leg = AnswerLeg(self, self._responder, plan.home, receipt, field_name, strip)
        self._start(plan.home, body, self._leg, self._services.config.timeouts.first_byte_s)
        self._leg.exchange = self._exchange

    def _with_usage(self, extra: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Ask for a stream's counts; whether they are to be kept from a client that did not."""
        options = self._body.get("stream_options")
        # Other words for true, as "yes", go as they are: asking for counts might contradict them.
        if self._body.get("stream") is not True or not isinstance(options, dict | None):
            return extra, False
        if options and options.get("include_usage"):
            return extra, False
        asked = {**(options or {}), "include_usage": True}
        if "continuous_usage_stats" in asked:
            asked["continuous_usage_stats"] = False  # it says nothing without ``include_usage``
        return {**extra, "stream_options": asked}, True

    def _start(
        self, node: Upstream, body: bytes, sink: WholeLeg | AnswerLeg, limit_s: float
    ) -> None:
        node.requests.add()
        self.deadline_s = time.monotonic() + limit_s
        wire = render(node, "POST", self._incoming.target, self._headers, body)
        self._exchange = node.pool.start_raw(node.origin, wire, sink)

    # what P says

    @_ending_the_turn
    def _prefill_answered(self, head: Head, raw: bytes) -> None:
        plan = self._current
        node = self._leave_prefill(plan)
        self._services.health.answered(node, time.monotonic())
        if head.status != 200:
            self._prefill_refused(plan, node, head, raw)
            return
        try:
            prefilled = read_prefilled(parse_body(raw))
            self._ask_home(plan, {PARAMS: prefilled.params})
        except (EngineError, BadRequestError, TooDeepError) as error:
            self._fail(f"{node.name}: {error}", "BadGatewayError", 502, "broken")
            return
        self._prefilled = prefilled

    def _prefill_refused(self, plan: Plan, node: Upstream, head: Head, raw: bytes) -> None:
        if head.status >= 500 and self._try_again({node.name}):
            return
        lines = receipt_lines(plan.decision, node.name) + response_lines(head)
        self._responder.send(head.status, raw, (), lines)
        self._finish("upstream_5xx" if head.status >= 500 else "upstream_4xx")

    def _prefill_failed(self, error: HttpError) -> None:
        if isinstance(error, CancelledExchangeError):
            return
        node = self._leave_prefill(self._current)
        self._services.health.failed(node, error)
        if not self._try_again({node.name}):
            self._fail(f"{node.name}: {error}", "BadGatewayError", 502, "broken")

    def _leave_prefill(self, plan: Plan) -> Upstream:
        assert plan.prefill is not None
        plan.prefill.prefill_tokens.add(-self._took_prefill_tokens)
        self._took_prefill_tokens = 0
        self._whole = None
        return plan.prefill

    # what the home says

    def known(self) -> None:
        """The home's answer is here whole: note it before the client can go on from it."""
        leg, plan = self._answer_leg, self._current
        if leg.status != 200 or leg.failed_inside:
            return
        now_s = leg.at_s + self._services.clock_offset_s
        chooser = self._services.chooser
        if chooser.learn(plan, self._body, leg.counted, now_s):
            self._services.health.doubt(plan.home)
        chooser.note(plan, leg.answer, self._prompt_tokens(leg), now_s)
        if chooser.policy.name == Route.PULL:
            self._hold(plan, leg)

    def answered(self) -> None:
        """The home's answer reached the client whole."""
        leg = self._answer_leg
        self._services.health.answered(self._current.home, leg.at_s)
        self._finish_by(leg)

    def _finish_by(self, leg: AnswerLeg) -> None:
        """End the turn by what its home said, all of which the client has."""
        if leg.failed_inside:
            self._finish("broken")
        elif leg.status == 200:
            self._finish("ok")
        else:
            self._release_elsewhere()  # whatever refused may not have told P
            self._finish("upstream_5xx" if leg.status >= 500 else "upstream_4xx")

    @_ending_the_turn
    def broke(self, error: HttpError) -> None:
        """The home's answer did not come, or not whole."""
        if isinstance(error, CancelledExchangeError):
            return
        plan, leg = self._current, self._answer_leg
        if leg.said_done:  # then no turn broke, but the node may have been begun anew
            self._services.health.doubt(plan.home)
        else:
            self._services.health.failed(plan.home, error)
        if not leg.began and self._try_again({plan.home.name}):
            return
        self._fail(f"{plan.home.name}: {error}", "BadGatewayError", 502, "broken")

    def _hold(self, plan: Plan, leg: AnswerLeg) -> None:
        """Keep what D offers for a later pull; only an unstreamed answer offers it."""
        prompt, answer = token_ids(self._body), leg.answer
        if leg.streaming or prompt is None or answer is None:
            return
        held = held_kv(parse_body(leg.whole), prompt, answer.token_ids)
        if held is not None:
            self._services.held.keep(plan.speaker.conversation, held)

    def _prompt_tokens(self, leg: AnswerLeg) -> int:
        """By the home's count, else by P's, else as estimated."""
        if leg.counted.prompt_tokens is not None:
            return leg.counted.prompt_tokens
        if self._prefilled is not None and self._prefilled.prompt_tokens is not None:
            return self._prefilled.prompt_tokens
        features = self._current.features
        return features.context_tokens + features.new_tokens

    # the way back

    def _try_again(self, without: set[str]) -> bool:
        """Once, elsewhere, as long as the client has seen nothing; whether that could be begun."""
        if self._retried or self._responder.gone:
            return False
        try:
            plan = self._services.chooser.again(self._current, without)
        except NoNodeError:
            return False
        self._retried = True
        self._pull_from = None  # an offer stands once, and its home may be the one that broke
        self._services.metrics.board.add("retries")
        self._release(plan.home)
        self._plan = plan
        self._leg = None
        self._send()
        return True

    def _client_gone(self) -> None:
        """Cancel whatever runs; P must not be left holding blocks that nobody will fetch."""
        leg = self._leg
        fetched = leg is not None and leg.began
        self._stop()
        if not fetched:
            self._release(self._current.home)
        self._finish("client_gone")

    def _stop(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()
        if self._took_prefill_tokens:
            self._leave_prefill(self._current)

    def _release_elsewhere(self) -> None:
        """Tell P by another home than the one that failed, where there is one."""
        if self._prefilled is not None:
            self._release(self._services.chooser.other_home(self._current.home))

    def _release(self, node: Upstream) -> None:
        """Tell P through ``node`` that its blocks are free; only a drain waits for it.

        It has a time limit: a node that hangs would else collect one connection per turn that was
        given up there.
        """
        prefilled, self._prefilled = self._prefilled, None
        if prefilled is None:
            return
        self._services.metrics.board.add("releases")
        body = orjson.dumps(release_body(prefilled))
        wire = render(node, "POST", "/v1/completions", b"content-type: application/json\r\n", body)
        end = self._services.release_begun()
        exchange = node.pool.start_raw(node.origin, wire, WholeLeg(end, end))
        limit_s = self._services.config.timeouts.first_byte_s
        asyncio.get_running_loop().call_later(limit_s, exchange.cancel)

    def _fail(self, message: str, kind: str, status: int, outcome: str) -> None:
        leg = self._leg
        if leg is not None and leg.said_done:
            leg.end_here()
            self._finish_by(leg)
        elif leg is not None and leg.began:
            leg.fail_inside(message, kind, status)
            self._finish(outcome)
        else:
            self._release_elsewhere()
            self._refuse(status, message, kind, outcome)

    def _refuse_body(self, message: str) -> None:
        encoding = self._incoming.get(b"content-encoding")
        if encoding is None:
            self._refuse(400, message, "BadRequestError", "bad_request")
        else:
            message = f"the body is encoded as {encoding.decode('latin-1')}; send it plain"
            self._refuse(415, message, "UnsupportedMediaTypeError", "bad_request")

    def _refuse(self, status: int, message: str, kind: str, outcome: str) -> None:
        headers = JSON if status < 500 else RETRY_SOON
        plan = self._plan
        lines = b"" if plan is None else receipt_lines(plan.decision, plan.home.name)
        self._responder.send(status, error_body(message, kind, status), headers, lines)
        self._finish(outcome)

    def _finish(self, outcome: str) -> None:
        """Give back what was taken; the first end counts."""
        if self.outcome:
            return
        self.outcome = outcome
        services = self._services
        services.turns.discard(self)
        services.metrics.in_flight.add(-1)
        self._run_on(None)
        services.metrics.outcome(outcome)
        if self._plan is not None:
            self._account(self._plan)
        self._let_go()

    def _let_go(self) -> None:
        """Break the circles of turn, leg, exchange and responder, so that nothing waits for gc."""
        responder, leg = self._responder, self._leg
        responder.on_gone = responder.on_writable = None
        if leg is not None:
            leg.exchange = None
        self._leg = self._exchange = self._whole = None

    def _run_on(self, node: Upstream | None) -> None:
        """Count the turn as running on ``node`` and nowhere else."""
        if self._running_on is not None:
            self._running_on.running.add(-1)
        if node is not None:
            node.running.add()
        self._running_on = node

    @property
    def _current(self) -> Plan:
        assert self._plan is not None
        return self._plan

    @property
    def _answer_leg(self) -> AnswerLeg:
        assert self._leg is not None
        return self._leg

    def _account(self, plan: Plan) -> None:
        """Metrics and the receipt."""
        services, leg = self._services, self._leg
        services.metrics.decide_s.observe(self.decide_s)
        ttft_s = tpot_s = None
        # Only a stream shows its first token; what an unstreamed answer took is no TTFT.
        if leg is not None and leg.streaming and leg.first_at_s and self.outcome == "ok":
            ttft_s = leg.first_at_s - self._incoming.received_at_s
            services.metrics.ttft_s.observe(ttft_s)
            tpot_s = _tpot_s(leg)
            if tpot_s is not None:
                services.metrics.tpot_s.observe(tpot_s)
            if plan.drift is not None:
                now_s = leg.at_s + services.clock_offset_s
                plan.drift.feed(plan.decision, ttft_s, now_s)
        counted = NOTHING if leg is None else leg.counted
        at_s = self._incoming.received_at_s + services.clock_offset_s
        services.receipts.record(Receipt.of(plan, self.outcome, ttft_s, tpot_s, counted, at_s))


def token_ids(body: Mapping[str, Any]) -> list[int] | None:
    """The prompt where it is token ids; ``None`` for text, chats and several prompts."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        return None
    return prompt


def _tpot_s(leg: AnswerLeg) -> float | None:
    """(last token − first)/(tokens − 1) of a stream; ``None`` where nothing was spread in time."""
    tokens = leg.counted.output_tokens
    if not leg.streaming or tokens is None or tokens < 2:
        return None
    if leg.first_at_s is None or leg.last_at_s is None:
        return None
    return (leg.last_at_s - leg.first_at_s) / (tokens - 1)
