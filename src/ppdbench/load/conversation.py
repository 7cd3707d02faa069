"""The conversation state machine, and who goes where: pure, and the same under every driver.

A :class:`Dialogue` says "send this turn at that time" and is told how the turn ended. A
:class:`Play` holds what the dialogues of one point share: placement, policy, records. Neither
knows a clock or a socket, so the wall-clock and the event-heap driver run the very same decisions.
"""

from __future__ import annotations

from collections.abc import Callable

from ppdbench.core.conversation import Conversation, Turn
from ppdbench.core.decision import Features, Route
from ppdbench.core.topology import NodeSpec, Topology
from ppdbench.policy.base import Policy
from ppdbench.policy.placement import Placement, least_loaded
from ppdbench.policy.rules import decide
from ppdbench.runs.records import TurnRecord


class Dialogue:
    """One conversation under way.

    ``send_at_s`` is when turn ``turn`` (1-based) must leave; it is ``None`` while a turn is out
    and after the end. A failed turn ends the conversation, because the next prompt would need the
    reply that never came.
    """

    __slots__ = ("conversation", "history_tokens", "home", "prefill_node", "send_at_s", "turn",
                 "warm_up")  # fmt: skip

    def __init__(self, conversation: Conversation, home: NodeSpec, begin_at_s: float) -> None:
        self.conversation = conversation
        self.home = home
        self.prefill_node: NodeSpec | None = None
        self.turn = 1
        self.history_tokens = conversation.context_tokens
        self.send_at_s: float | None = begin_at_s
        self.warm_up = False

    def __repr__(self) -> str:
        turns = len(self.conversation.turns)
        return f"<Dialogue {self.conversation.id} turn {self.turn}/{turns} at {self.send_at_s}>"

    @property
    def plan(self) -> Turn:
        """The turn that is due or out."""
        return self.conversation.turns[self.turn - 1]

    def sent(self) -> None:
        """The turn is out."""
        assert self.send_at_s is not None
        self.send_at_s = None

    def answered(self, record: TurnRecord) -> float | None:
        """Take the outcome; when the next turn must leave, ``None`` when the conversation is over.

        The pause before a turn begins at the last token of the one before.
        """
        assert self.send_at_s is None
        if not record.ok or self.turn == len(self.conversation.turns):
            return None
        self.history_tokens = self._prompt_tokens(record) + self._output_tokens(record)
        self.turn += 1
        assert record.finished_at_s is not None
        self.send_at_s = record.finished_at_s + self.plan.think_s
        return self.send_at_s

    def _prompt_tokens(self, record: TurnRecord) -> int:
        """The server's count where there is one: text may have become other tokens than planned."""
        planned = self.history_tokens + self.plan.new_tokens
        return planned if record.prompt_tokens is None else record.prompt_tokens

    def _output_tokens(self, record: TurnRecord) -> int:
        return self.plan.output_tokens if record.output_tokens is None else record.output_tokens


class Play:
    """What the dialogues of one point share. ``records`` grows in the order of sending.

    ``running`` counts the requests on a node, or says ``None``; ``outstanding`` counts the prompt
    tokens that a P has still to compute. Both are asked at the moment a turn leaves. ``homes``
    leaves some of the topology's homes to other processes.
    """

    def __init__(  # noqa: PLR0913  (what a point decides with)
        self,
        topology: Topology,
        policy: Policy,
        rate_per_s: float,
        *,
        running: Callable[[str], int | None],
        outstanding: Callable[[str], float],
        homes: tuple[NodeSpec, ...] | None = None,
    ) -> None:
        self.records: list[TurnRecord] = []
        self._policy = policy
        self._rate_per_s = rate_per_s
        self._running = running
        self._outstanding = outstanding
        self._placement = Placement(topology.homes if homes is None else homes)
        self._prefill_nodes = topology.prefill_nodes

    def begin(self, conversation: Conversation, at_s: float) -> Dialogue:
        """A conversation arrives and gets its home."""
        return Dialogue(conversation, self._placement.home_of(conversation.id), at_s)

    def send(self, dialogue: Dialogue, now_s: float) -> TurnRecord:
        """The turn leaves now: decide its route and open its record."""
        scheduled_at_s = dialogue.send_at_s
        assert scheduled_at_s is not None
        plan = dialogue.plan
        decision = decide(self._policy, self._features(dialogue, plan), dialogue.home.role)
        prefill = decision.route in (Route.REMOTE, Route.PULL)
        record = TurnRecord(
            dialogue.conversation.id,
            dialogue.turn,
            decision.route,
            dialogue.home.name,
            scheduled_at_s,
            now_s,
            prefill_node=self._prefill_node(dialogue) if prefill else None,
            context_tokens=dialogue.history_tokens,
            new_tokens=plan.new_tokens,
            wanted_output_tokens=plan.output_tokens,
            reason=decision.reason,
            warm_up=dialogue.warm_up,
        )
        dialogue.sent()
        self.records.append(record)
        return record

    def close(self, dialogue: Dialogue, record: TurnRecord) -> float | None:
        """The turn has ended; when the next one must leave, ``None`` at the conversation's end."""
        next_at_s = dialogue.answered(record)
        if next_at_s is None:
            self._placement.release(dialogue.conversation.id)
        return next_at_s

    def _features(self, dialogue: Dialogue, plan: Turn) -> Features:
        return Features(
            dialogue.turn,
            dialogue.history_tokens,
            plan.new_tokens,
            plan.output_tokens,
            self._rate_per_s,
            self._running(dialogue.home.name),
            f"{dialogue.conversation.id}/{dialogue.turn}",
        )

    def _prefill_node(self, dialogue: Dialogue) -> str:
        """A conversation keeps its P, which has the history in its cache."""
        if dialogue.prefill_node is None:
            dialogue.prefill_node = least_loaded(self._prefill_nodes, self._outstanding)
        return dialogue.prefill_node.name
