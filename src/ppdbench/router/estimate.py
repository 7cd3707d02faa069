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

_OUTPUT_WEIGHT = 0.02
_RATIO_RANGE = (0.25, 32.0)


class Estimates:
    """Running knowledge of one model. Only ``learn_*`` change it."""

    def __init__(self) -> None:
        self._tokens = 250.0
        self._characters = self._tokens * CHARACTERS_PER_TOKEN
        self._output = OUTPUT_TOKENS
        self._outputs_seen = 0

    def __repr__(self) -> str:
        return f"<Estimates {self.characters_per_token:.2f} chars/token, output {self._output:.0f}>"

    @property
    def characters_per_token(self) -> float:
        return self._characters / self._tokens

    def tokens_in(self, characters: int) -> int:
        return max(1, round(characters / self.characters_per_token))

    def learn_ratio(self, characters: int, tokens: int) -> None:
        """A server counted ``tokens`` for ``characters``; old knowledge fades."""
        low, high = _RATIO_RANGE
        if tokens < 1 or not low <= characters / tokens <= high:
            return
        share = min(1.0, _MOST_AT_ONCE * _WEIGHT_LIMIT_TOKENS / tokens)
        self._tokens += tokens * share
        self._characters += characters * share
        if self._tokens > _WEIGHT_LIMIT_TOKENS:
            fade = _WEIGHT_LIMIT_TOKENS / self._tokens
            self._tokens *= fade
            self._characters *= fade

    def learn_output(self, tokens: int) -> None:
        """A server counted an answer's tokens; the mean over the first answers is plain."""
        self._outputs_seen += 1
        weight = max(_OUTPUT_WEIGHT, 1 / self._outputs_seen)
        self._output += weight * (tokens - self._output)

    def output_tokens(self, body: Mapping[str, Any]) -> int:
        """Expected length of the answer to ``body``."""
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            return round(self._output)
        if body.get("ignore_eos") is True or body.get("min_tokens") == limit:
            return limit
        return max(1, round(min(limit, self._output)))
