"""What a completion's answer says: token instants, counts, ids, and whether it ended well.

Works for ``/v1/completions`` and ``/v1/chat/completions``, streamed or whole, as vLLM and its
relatives send them. What counts as a token: text, reasoning, a tool call, or ids. A role alone, a
usage chunk and a bare finish reason do not.
"""

from __future__ import annotations

from typing import Any

import orjson

from ppdbench.http.sse import SseParser

DONE = b"[DONE]"
CUT_SHORT = ("abort", "error")
"""Finish reasons of answers that the engine gave up: they come with HTTP 200 and ``[DONE]``."""
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")


class Reply:
    """Grows as the answer comes in. ``feed`` takes body bytes and the instant of their read.

    ``token_at_s`` has one entry per token where ids or a running count say how many a chunk holds,
    else one per chunk that carried tokens. ``error`` is the server's own words.
    """

    __slots__ = (
        "_chunk_tokens", "_parser", "answer_at_s", "cached_tokens", "completion_tokens", "done",
        "error", "finish_reason", "first_token_at_s", "kv_transfer_params",
        "last_token_at_s", "prompt_token_ids", "prompt_tokens", "text", "token_at_s", "token_ids",
    )  # fmt: skip

    def __init__(self) -> None:
        self._parser = SseParser()
        self._chunk_tokens = 0
        self.first_token_at_s: float | None = None
        self.answer_at_s: float | None = None
        self.last_token_at_s: float | None = None
        self.token_at_s: list[float] = []
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] = []
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.done = False
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.error: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer said that it was over; a closed connection alone says nothing."""
        return self.error is None and (self.done or self.finish_reason is not None)

    @property
    def output_tokens(self) -> int:
        """The server's count, else the best of what was seen (then ``counts_estimated``)."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return len(self.token_ids) or self._chunk_tokens

    @property
    def counts_estimated(self) -> bool:
        return self.completion_tokens is None and not self.token_ids

    @property
    def exact_token_at_s(self) -> list[float]:
        """An instant per token, or nothing when some chunk held an unknown number of them."""
        exact = len(self.token_at_s) == self.output_tokens and not self.counts_estimated
        return self.token_at_s if exact else []

    def feed(self, data: bytes, at_s: float) -> None:
        """Take streamed body bytes."""
        for event in self._parser.feed(data):
            self.take_event(event, at_s)

    def feed_whole(self, body: bytes, at_s: float) -> None:
        """Take an unstreamed answer: all its tokens came at ``at_s``."""
        self.take_event(body, at_s)
        self.done = self.error is None

    def take_event(self, event: bytes, at_s: float) -> None:
        """Take one event's data."""
        if event == DONE:
            self.done = True
            return
        try:
            document = orjson.loads(event)
        except ValueError:
            self.error = f"the answer holds an event that is no JSON: {event[:80]!r}"
            return
        if not isinstance(document, dict):
            self.error = f"the answer holds an event that is no object: {event[:80]!r}"
            return
        try:
            self._take(document, at_s)
        except (AttributeError, KeyError, TypeError):
            self.error = f"the answer holds an event that is no completion: {event[:80]!r}"

    def _take(self, document: dict[str, Any], at_s: float) -> None:
        usage = document.get("usage")
        counted = self._take_usage(usage) if usage else None
        choices = document.get("choices")
        if choices:
            self._take_choice(choices[0], counted, at_s)
        if document.get("error") is not None:
            self.error = _error_text(document["error"])
        elif document.get("object") == "error":
            self.error = _error_text(document)
        if document.get("kv_transfer_params"):
            self.kv_transfer_params = document["kv_transfer_params"]

    def _take_usage(self, usage: dict[str, Any]) -> int | None:
        """Note the counts; returns how many tokens are new since the last usage."""
        before = self.completion_tokens or 0
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        return None if self.completion_tokens is None else self.completion_tokens - before

    def _take_choice(self, choice: dict[str, Any], counted: int | None, at_s: float) -> None:
        ids = choice.get("token_ids")
        delta = choice.get("delta") or choice.get("message")
        answer = choice.get("text") if delta is None else delta.get("content")
        if answer:
            self.text.append(answer)
        if choice.get("finish_reason") is not None:
            self._take_finish(choice["finish_reason"])
        if choice.get("prompt_token_ids"):
            self.prompt_token_ids = choice["prompt_token_ids"]
        carries = bool(ids or answer or (delta is not None and _carries_tokens(delta)))
        if carries:
            self._take_tokens(ids, counted, at_s)
            if answer and self.answer_at_s is None:
                self.answer_at_s = at_s

    def _take_finish(self, reason: str) -> None:
        self.finish_reason = reason
        if reason in CUT_SHORT:
            self.error = f"the engine cut the answer short (finish reason {reason!r})"

    def _take_tokens(self, ids: list[int] | None, counted: int | None, at_s: float) -> None:
        if self.first_token_at_s is None:
            self.first_token_at_s = at_s
        self.last_token_at_s = at_s
        if ids:
            self.token_ids += ids
        tokens = len(ids) if ids else counted
        if not tokens:
            # No ids and no running count: one token is a guess, and the total may refute it.
            tokens = 1
        self._chunk_tokens += tokens
        self.token_at_s += [at_s] * tokens if tokens > 1 else [at_s]


def _count(value: object, known: int | None) -> int | None:
    """A null says nothing new; TypeError for what is no count."""
    if value is not None and not isinstance(value, int):
        raise TypeError(value)
    return known if value is None else value


def _carries_tokens(delta: dict[str, Any]) -> bool:
    return any(delta.get(name) for name in _TEXT_FIELDS) or bool(delta.get("tool_calls"))


def _error_text(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return f"the server reported: {text}"
