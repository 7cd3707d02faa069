"""What a conversation sends: its own history with the model's real replies in it."""

from __future__ import annotations

from typing import Any, Protocol

from ppdbench.core.conversation import Conversation, Turn
from ppdbench.core.seeds import rng_for
from ppdbench.http.reply import Reply

FIRST_ID = 256
"""Below it stand many tokenizers' special tokens."""


class History(Protocol):
    """Grows by a request and a reply per turn."""

    path: str

    def ask(self, number: int, plan: Turn) -> dict[str, Any]:
        """The fields that carry the prompt of turn ``number``; called once per turn."""
        ...

    def hear(self, reply: Reply) -> str:
        """Take the reply; what makes it unfit for the next prompt, or nothing."""
        ...

    @property
    def ids(self) -> list[int] | None:
        """Everything so far as token ids, ``None`` when only the server knows them."""
        ...


def history_for(
    conversation: Conversation, seed: int, vocabulary: int, *, recorded_replies: bool = False
) -> History:
    """Text where the workload has text and no ids; otherwise ids, drawn where it has neither.

    With ``recorded_replies`` the workload's own replies stand in the history, not the model's.
    """
    first = conversation.turns[0]
    if first.text is not None and first.token_ids is None:
        return TextHistory(conversation, recorded_replies=recorded_replies)
    return IdHistory(conversation, seed, vocabulary, recorded_replies=recorded_replies)


class IdHistory:
    """A prompt of token ids, so that the reply comes back as exactly the tokens it was.

    Ids that the workload does not give are drawn from [256, ``vocabulary``), by conversation and
    turn alone, so that every route sends equal prompts. A shared context is drawn by its name.
    """

    path = "/v1/completions"

    def __init__(
        self,
        conversation: Conversation,
        seed: int,
        vocabulary: int,
        *,
        recorded_replies: bool = False,
    ) -> None:
        self._recorded = recorded_replies
        self._recorded_reply: tuple[int, ...] = ()
        self._id = conversation.id
        self._seed = seed
        self._vocabulary = vocabulary
        self._all = self._context(conversation)

    @property
    def ids(self) -> list[int] | None:
        return self._all

    def ask(self, number: int, plan: Turn) -> dict[str, Any]:
        self._all += plan.token_ids or self._draw(plan.new_tokens, self._id, number)
        self._recorded_reply = plan.reply_token_ids or ()
        return {"prompt": self._all, "return_token_ids": True}

    def hear(self, reply: Reply) -> str:
        if self._recorded:
            self._all += self._recorded_reply
            return ""
        if not reply.token_ids:
            return (
                "the server returned no token_ids, which the next prompt needs; use an engine "
                "that knows return_token_ids (vLLM 0.10.2 or later) or a workload of texts"
            )
        self._all += reply.token_ids
        return ""

    def _context(self, conversation: Conversation) -> list[int]:
        if conversation.context_token_ids is not None:
            return list(conversation.context_token_ids)
        shared = self._draw(conversation.shared_tokens, "shared", conversation.shared_id)
        own = conversation.context_tokens - conversation.shared_tokens
        return shared + self._draw(own, self._id, 0)

    def _draw(self, count: int, *names: object) -> list[int]:
        if count == 0:
            return []
        rng = rng_for(self._seed, "content", *names)
        ids: list[int] = rng.integers(FIRST_ID, self._vocabulary, count).tolist()
        return ids


class TextHistory:
    """A chat. The server tokenises it anew each turn, and the report says what that cost."""

    path = "/v1/chat/completions"
    ids = None

    def __init__(self, conversation: Conversation, *, recorded_replies: bool = False) -> None:
        self._recorded = recorded_replies
        self._recorded_reply = ""
        self._messages: list[dict[str, str]] = []
        if conversation.context_text:
            self._say(conversation.context_role, conversation.context_text)

    def ask(self, number: int, plan: Turn) -> dict[str, Any]:  # noqa: ARG002
        self._say("user", plan.text or "")
        self._recorded_reply = plan.reply_text or ""
        return {"messages": self._messages}

    def hear(self, reply: Reply) -> str:
        said = self._recorded_reply if self._recorded else "".join(reply.text)
        self._say("assistant", said)
        return ""

    def _say(self, role: str, text: str) -> None:
        self._messages.append({"role": role, "content": text})
