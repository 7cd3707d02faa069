"""From a request to a plan: who speaks, what is held where, which route. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.topology import Role
from ppdbench.policy.base import Policy
from ppdbench.policy.placement import Placement, least_loaded
from ppdbench.policy.rules import COLD, REPLICA_HOME, decide
from ppdbench.router.answer import Counted
from ppdbench.router.board import ArrivalRate
from ppdbench.router.drift import Drift
from ppdbench.router.estimate import Estimates
from ppdbench.router.history import Answer, Found, History, Place
from ppdbench.router.identity import explicit_key, read_history
from ppdbench.router.memory import (
    MOST_TURN,
    NO_PREFILL,
    REASONED_STEPS,
    SEVERAL,
    SPLIT,
    Memory,
    Note,
    prefill_flags,
)
from ppdbench.router.messages import answers_a_tool_call
from ppdbench.router.nodes import Upstream, Upstreams

ALONE = Decision(Route.LOCAL, "alone")
"""What a hand-off cannot carry, several prompts or answers in one request, is computed whole."""

MOVED = Decision(Route.REMOTE, "moved")
"""The home runs far more than its share; another one gets the conversation, whole."""

_THROUGH_P = frozenset({Route.REMOTE, Route.PULL})
CALM_RUNNING = 32
OVERLOAD_FACTOR = 1.5
MODELS_LIMIT = 64
LOST_SHARE = 0.5
JUDGED_FROM_TOKENS = 256
"""Below two blocks of 128 tokens, the largest in use, rounding alone can hide half a context."""

COUNTED_CHARACTERS = 16_384
"""Longer texts are estimated: a tokenizer takes about 9 ms for these, and all other turns wait."""

_SEVERAL_FIELDS = frozenset(
    {"n", "best_of", "use_beam_search", "echo", "prompt_logprobs", "prompt"}
)
"""A body without any of these, as most chats are, asks for one answer to one prompt."""


class NoNodeError(Exception):
    """No living node can take the turn; the text says which kind is missing."""


class Speaker(Struct, frozen=True):
    """Who is speaking. ``name`` is the client's own, else the number in hexadecimal."""

    conversation: int
    name: str
    turn: int
    history: History | None
    found: Found | None


class Plan(Struct, frozen=True):
    """Where a turn goes and why, and what is needed to note it afterwards.

    ``drift`` is of the table that was asked; another one may have been taken meanwhile. ``several``
    prompts or answers: their counts are of all together. ``steps``: the prompt still has the
    reasoning before the tool calls of its history.
    """

    decision: Decision
    features: Features
    speaker: Speaker
    home: Upstream
    prefill: Upstream | None
    holds_kv: bool
    shadow: Decision | None = None
    drift: Drift | None = None
    several: bool = False
    steps: bool = False


class Chooser:
    """Plans turns with one policy over shared memory; reads only the clock it is given.

    ``count_tokens`` is the served model's tokenizer, if it is at hand.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (what a decision is made of)
        self,
        upstreams: Upstreams,
        policy: Policy,
        memory: Memory,
        rate: ArrivalRate,
        shadow: Policy | None = None,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.memory = memory
        self._count_tokens = count_tokens
        self.use(policy, shadow)
        self._upstreams = upstreams
        self._rate = rate
        self._estimates: dict[str, Estimates] = {}
        self._placement = Placement(node.spec for node in upstreams.homes)

    def use(self, policy: Policy, shadow: Policy | None = None) -> None:
        """Decide by ``policy`` from now on; ``shadow`` is asked too and obeyed by nobody."""
        self.policy = policy
        self.shadow = shadow
        table = getattr(policy, "table", None)
        self.drift = None if table is None else Drift(table)

    def estimates(self, body: Mapping[str, Any]) -> Estimates:
        """One set per model; a flood of unknown names shares one."""
        model = body.get("model")
        name = model if isinstance(model, str) else ""
        known = self._estimates.get(name)
        if known is None:
            name = name if len(self._estimates) < MODELS_LIMIT else ""
            known = self._estimates.setdefault(name, Estimates())
        return known

    def plan(
        self,
        body: Mapping[str, Any],
        session_id: bytes | None,
        now_s: float,
        forced: Route | None = None,
    ) -> Plan:
        """Choose; ``forced`` is the client's own wish where that is allowed.

        Raises:
            NoNodeError: nothing alive can take it.
        """
        speaker = self._identify(body, session_id)
        if speaker.found is None:
            self._rate.count(now_s)
        home, holds_kv = self._home(speaker.found)
        moved = holds_kv and self._overloaded(home)
        if moved:
            home, holds_kv = self._calmest(), False
        features = self._features(body, speaker, home, holds_kv=holds_kv, now_s=now_s)
        shadow = None
        several = _needs_one_node(body)
        if several and home.role is not Role.R:
            decision = ALONE
        elif forced is not None and home.role is not Role.R:
            decision = Decision(forced, "override")
        else:
            decision = decide(self.policy, features, home.role, holds_kv=holds_kv)
            if self.drift is not None:
                decision = self.drift.corrected(decision, now_s)
            if self.shadow is not None:
                shadow = decide(self.shadow, features, home.role, holds_kv=holds_kv)
            if moved:
                decision = MOVED if decision is COLD else decision
                shadow = MOVED if shadow is COLD else shadow
        if self._needs_a_replica(decision):
            home, holds_kv = self._place(()), False
            features = self._features(body, speaker, home, holds_kv=holds_kv, now_s=now_s)
            decision = REPLICA_HOME
        prefill = self._prefill_for(decision, speaker.found)
        steps = _has_steps(speaker.found) and answers_a_tool_call(body)
        return Plan(
            decision, features, speaker, home, prefill, holds_kv, shadow, self.drift, several, steps
        )

    def again(self, plan: Plan, without: Collection[str]) -> Plan:
        """The plan after its nodes in ``without`` broke: another P, or another home and so cold.

        Where there is no other P, an R does without.

        Raises:
            NoNodeError: there is no other.
        """
        if plan.home.name in without or self._needs_a_replica(plan.decision, without):
            home = self._place(without)
            decision = decide(self.policy, plan.features, home.role, holds_kv=False)
            if plan.several and home.role is not Role.R:
                decision = ALONE
            else:
                decision = decision._replace(reason="retry")
            features = _all_new(plan.features, int(home.running.total()))
            plan = replace(plan, features=features, home=home, decision=decision, holds_kv=False)
        return replace(plan, prefill=self._prefill_for(plan.decision, plan.speaker.found, without))

    def note(self, plan: Plan, answer: Answer | None, prompt_tokens: int, now_s: float) -> None:
        """Remember a turn that was answered: where it was computed and how long it now is.

        Of several answers nobody knows which one the client goes on from.
        """
        speaker, home = plan.speaker, plan.home
        history = speaker.history
        if history is None:
            return
        note = Note(
            speaker.conversation,
            prompt_tokens,
            history.size,
            int(now_s),
            home.index,
            min(speaker.turn, MOST_TURN),
            home.epoch,
            prefill_flags(_last_prefill(plan)) | (REASONED_STEPS if plan.steps else 0),
        )
        history.leave(self.memory, note, None if plan.several else answer)

    def learn(self, plan: Plan, body: Mapping[str, Any], counted: Counted, now_s: float) -> bool:
        """Correct the estimates, and what is thought of the home's cache, by what was counted.

        Whether the home had lost what it was thought to hold.
        """
        estimates = self.estimates(body)
        if counted.output_tokens and not plan.several:
            estimates.learn_output(counted.output_tokens, body)
        history, found = plan.speaker.history, plan.speaker.found
        if counted.prompt_tokens is None or history is None:
            return False
        held = found.note if found is not None and plan.holds_kv else None
        # Of tools the whole prompt's count tells, and the messages' characters do not.
        if not history.in_tokens and (held is not None or not body.get("tools")):
            characters = history.size - (held.size if held else 0)
            tokens = counted.prompt_tokens - (held.context_tokens if held else 0)
            estimates.learn_ratio(characters, tokens, of_a_part=held is not None)
        if held is None or plan.decision.route is not Route.LOCAL:
            return False
        if _has_steps(found) and not plan.steps:
            return False  # the template took the steps' reasoning out: that is no loss
        return _learn_residency(plan.home, held, counted.cached_tokens, now_s)

    def _identify(self, body: Mapping[str, Any], session_id: bytes | None) -> Speaker:
        explicit = explicit_key(session_id, body)
        history = read_history(body, explicit)
        found = None if history is None else history.find(self.memory)
        if explicit is not None:
            conversation = int.from_bytes(explicit[:8], "little")
            name = (session_id or b"").decode("utf-8", "replace")
        else:
            known = found is not None and not found.note.flags & SEVERAL
            conversation = found.note.conversation if found and known else secrets.randbits(64)
            name = f"{conversation:016x}"
        return Speaker(conversation, name, _turn(history, found), history, found)

    def _home(self, found: Found | None) -> tuple[Upstream, bool]:
        """The home and whether it holds the conversation's KV as far as anybody knows."""
        if found is None or found.note.flags & SPLIT:
            return self._place(()), False
        note = found.note
        home = self._upstreams.home_at(note.home)
        if home is None or not home.alive:
            return self._place(()), False
        known = found.place is not Place.DIFFERS and home.epoch == note.epoch
        return home, known and not _evicted(home, note)

    def _overloaded(self, home: Upstream) -> bool:
        """Whether ``home`` runs far more than its share, so that its conversations may move.

        Not while nobody could compute their history anew.
        """
        running = home.running.total()
        if running <= CALM_RUNNING or not (self._prefills(()) or self._replicas(())):
            return False
        alive = [node.running.total() for node in self._upstreams.homes if node.alive]
        return running > OVERLOAD_FACTOR * sum(alive) / len(alive)

    def other_home(self, home: Upstream) -> Upstream:
        """A living node that can take hand-offs too, or ``home`` where there is no other."""
        for node in self._upstreams.homes:
            if node is not home and node.alive and node.role.needs_prefill_node:
                return node
        return home

    def _calmest(self) -> Upstream:
        alive = [node for node in self._upstreams.homes if node.alive]
        return min(alive, key=lambda node: node.running.total())

    def _place(self, without: Collection[str]) -> Upstream:
        """A home for one conversation more; while no P lives, an R if there is one."""
        usable = {n.name for n in self._upstreams.homes if n.alive and n.name not in without}
        if not usable:
            raise NoNodeError("no node that decodes (D, pD or R) is alive")
        if not self._prefills(without):
            usable = self._replicas(without) or usable
        return self._upstreams[self._placement.place(usable).name]

    def _needs_a_replica(self, decision: Decision, without: Collection[str] = ()) -> bool:
        """Whether the turn would go through P, none is left, and an R could have it."""
        through_p = decision.route in _THROUGH_P
        return through_p and not self._prefills(without) and bool(self._replicas(without))

    def _replicas(self, without: Collection[str]) -> set[str]:
        homes = (node for node in self._upstreams.homes if node.alive and node.role is Role.R)
        return {node.name for node in homes if node.name not in without}

    def _prefills(self, without: Collection[str]) -> list[Upstream]:
        return [n for n in self._upstreams.prefills if n.alive and n.name not in without]

    def _prefill_for(
        self, decision: Decision, found: Found | None, without: Collection[str] = ()
    ) -> Upstream | None:
        """The P with the least to compute; the one that has the history need not compute it."""
        if decision.route not in _THROUGH_P:
            return None
        usable = self._prefills(without)
        if not usable:
            raise NoNodeError("no prefill node (P) is alive")
        if len(usable) == 1:
            return usable[0]
        specs = [node.spec for node in usable]
        load = {node.name: node.prefill_tokens.total() for node in usable}
        if found is not None:
            for node in usable:
                if node.index == found.note.prefill:
                    load[node.name] -= found.note.context_tokens
        return self._upstreams[least_loaded(specs, load).name]

    def _features(
        self,
        body: Mapping[str, Any],
        speaker: Speaker,
        home: Upstream,
        *,
        holds_kv: bool,
        now_s: float,
    ) -> Features:
        estimates = self.estimates(body)
        context, new = _tokens(speaker, estimates, holds_kv=holds_kv)
        if self._count_tokens is not None and holds_kv and home.role is not Role.R:
            new = _counted(speaker, self._count_tokens) or new
        return Features(
            turn=speaker.turn,
            context_tokens=context,
            new_tokens=new,
            output_tokens=estimates.output_tokens(body),
            rate_per_s=self._rate.per_s(now_s),
            running=int(home.running.total()),
            key=f"{speaker.name}/{speaker.turn}",
        )


def _all_new(features: Features, running: int) -> Features:
    """Of the same turn at a home that holds nothing of it."""
    tokens = features.context_tokens + features.new_tokens
    return features._replace(context_tokens=0, new_tokens=tokens, running=running)


def _learn_residency(home: Upstream, note: Note, cached_tokens: int | None, now_s: float) -> bool:
    """Whether KV was lost, judged by the last question: an answer may come back as other tokens.

    A loss shows that all KV last used no later than the note's is gone, and says of no other. So
    what the node computed since, or after a restart, is trusted, whenever the loss is seen. A note
    of before the clock was set back may lie ahead. Where KV events are heard, they alone say what
    is gone: few cached tokens may also come from a template that moves what was said before.
    """
    asked_tokens = note.context_tokens - note.answer_tokens
    if cached_tokens is None or asked_tokens < JUDGED_FROM_TOKENS:
        return False
    if cached_tokens >= LOST_SHARE * asked_tokens:
        return False
    if not home.is_heard:
        home.lost_s.put(max(home.lost_s.get(), min(note.used_s, int(now_s))))
    return True


def _has_steps(found: Found | None) -> bool:
    return found is not None and bool(found.note.flags & REASONED_STEPS)


def _evicted(home: Upstream, note: Note) -> bool:
    """Whether KV last used no earlier than this note's is known to be gone.

    By the node's KV events, or by what an answer counted as cached.
    """
    return note.used_s <= home.gone_s.get() or note.used_s <= home.lost_s.get()


def _last_prefill(plan: Plan) -> int:
    """The number of the P that has most of this conversation, if any had it."""
    if plan.prefill is not None:
        return plan.prefill.index
    found = plan.speaker.found
    return NO_PREFILL if found is None else found.note.prefill


def _turn(history: History | None, found: Found | None) -> int:
    """By the answers in the history; of a raw prompt by the turn whose history it continues."""
    if history is not None and history.turn is not None:
        return history.turn
    if found is None:
        return 1
    return found.note.turn + (found.place is not Place.REPEATS)


def _tokens(speaker: Speaker, estimates: Estimates, *, holds_kv: bool) -> tuple[int, int]:
    """Context that the home holds, and what is new to it."""
    history, found = speaker.history, speaker.found
    if history is None:
        return 0, 1
    note = found.note if holds_kv and found is not None else None
    if history.in_tokens:
        context = 0 if note is None else min(note.context_tokens, history.size - 1)
        return context, history.size - context
    if note is None:
        return 0, estimates.tokens_in(history.size)
    return note.context_tokens, estimates.tokens_in(max(0, history.size - note.size))


def _counted(speaker: Speaker, count: Callable[[str], int]) -> int:
    """Tokens in the new part of a text; 0 where there is none or it is too long to count."""
    history, found = speaker.history, speaker.found
    if history is None or found is None:
        return 0
    texts = history.texts_behind(found.note)
    return sum(map(count, texts)) if sum(map(len, texts)) <= COUNTED_CHARACTERS else 0


def _needs_one_node(body: Mapping[str, Any]) -> bool:
    """Several prompts or answers share one hand-off, and a second read of its blocks fails."""
    if _SEVERAL_FIELDS.isdisjoint(body):
        return False
    # vLLM also takes 2.0 and "2"; what it refuses, the home refuses too.
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return True
    if body.get("use_beam_search") or body.get("echo") or body.get("prompt_logprobs") is not None:
        return True
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
