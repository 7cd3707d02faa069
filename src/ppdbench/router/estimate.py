"""How many tokens a text has and how long an answer will be, learned from what servers counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARACTERS_PER_TOKEN = 4.0
"""Until the first answer has corrected it."""

OUTPUT_TOKENS = 256.0
"""Expected answer until the first one has been counted."""

_WEIGHT_LIMIT_TOKENS = 20_000.0
_MOST_AT_ONCE = 0.1
"""Of the limit: no single text, however long and odd, weighs more."""

_FIRST_WEIGHT_TOKENS = 250.0
_OUTPUT_WEIGHT = 0.02
_RATIO_RANGE = (0.25, 32.0)


class Estimates:
    """Running knowledge of one model. Only ``learn_*`` change it."""

    def __init__(self) -> None:
        self._tokens = _FIRST_WEIGHT_TOKENS
        self._characters = self._tokens * CHARACTERS_PER_TOKEN
        self._knows_parts = False
        self._output = OUTPUT_TOKENS
        self._outputs_seen = 0

    def __repr__(self) -> str:
        return f"<Estimates {self.characters_per_token:.2f} chars/token, output {self._output:.0f}>"

    @property
    def characters_per_token(self) -> float:
        return self._characters / self._tokens

    def tokens_in(self, characters: int) -> int:
        return max(1, round(characters / self.characters_per_token))

    def learn_ratio(self, characters: int, tokens: int, *, of_a_part: bool) -> None:
        """A server counted ``tokens`` for ``characters``; old knowledge fades.

        A whole prompt's count holds what a template puts before it, which no later turn's new part
        has. So it teaches only as long as no part did.
        """
        low, high = _RATIO_RANGE
        if tokens < 1 or not low <= characters / tokens <= high:
            return
        if of_a_part and not self._knows_parts:
            self._knows_parts = True
            self._fade_to(_FIRST_WEIGHT_TOKENS)
        if of_a_part is self._knows_parts:
            share = min(1.0, _MOST_AT_ONCE * _WEIGHT_LIMIT_TOKENS / tokens)
            self._tokens += tokens * share
            self._characters += characters * share
            self._fade_to(_WEIGHT_LIMIT_TOKENS)

    def _fade_to(self, weight_tokens: float) -> None:
        fade = min(1.0, weight_tokens / self._tokens)
        self._tokens *= fade
        self._characters *= fade

    def learn_output(self, tokens: int, body: Mapping[str, Any]) -> None:
        """A server counted the tokens of the answer to ``body``.

        The mean over the first answers is plain. One that its limit cut off below the mean tells
        nothing of how long answers become.
        """
        if tokens < self._output and tokens == _limit(body):
            return
        self._outputs_seen += 1
        weight = max(_OUTPUT_WEIGHT, 1 / self._outputs_seen)
        self._output += weight * (tokens - self._output)

    def output_tokens(self, body: Mapping[str, Any]) -> int:
        """Expected length of the answer to ``body``."""
        limit = _limit(body)
        if limit is None:
            return round(self._output)
        if body.get("ignore_eos") is True or body.get("min_tokens") == limit:
            return limit
        return max(1, round(min(limit, self._output)))


def _limit(body: Mapping[str, Any]) -> int | None:
    """What the client lets an answer have."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        return None
    return limit
