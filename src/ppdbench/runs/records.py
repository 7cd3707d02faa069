"""One record per turn: instants and counts; every latency is derived, never stored."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from ppdbench.core.decision import Route


class Outcome(StrEnum):
    """How a turn ended. Anything but OK has no TTFT and counts against success."""

    OK = "ok"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    NO_FIRST_BYTE = "no_first_byte"
    BROKEN_STREAM = "broken_stream"
    UPSTREAM_STATUS = "upstream_status"
    WRONG_LENGTH = "wrong_length"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class TurnRecord:
    """What happened to one turn. Instants are seconds on the run's monotonic clock, 0 = start.

    ``scheduled_at_s ≤ sent_at_s ≤ first_token_at_s ≤ finished_at_s`` where they are present; a
    turn that got no token has ``first_token_at_s`` ``None``. ``finished_at_s`` is the last token's
    instant of a good turn. Token counts are the server's unless ``counts_estimated``;
    ``cached_tokens`` is ``None`` when the server said nothing, never 0. ``new_tokens`` and
    ``context_tokens`` split the prompt as the workload planned it. An answer that came ``whole``,
    not streamed, has no instant of its first token: the turn is good and has no TTFT and no TPOT.
    """

    conversation: str
    turn: int
    route: Route
    node: str
    scheduled_at_s: float
    sent_at_s: float
    prefill_node: str | None = None
    first_token_at_s: float | None = None
    finished_at_s: float | None = None
    context_tokens: int = 0
    new_tokens: int = 0
    wanted_output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    recomputed_tokens: int | None = None
    bytes_moved: int | None = None
    counts_estimated: bool = False
    outcome: Outcome = Outcome.OK
    error: str = ""
    reason: str = ""
    warm_up: bool = False
    whole: bool = False
    token_at_s: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        came = self.whole or self.first_token_at_s is not None
        return self.outcome is Outcome.OK and came

    @property
    def ttft_s(self) -> float | None:
        """From the schedule, so a wait behind the client counts."""
        return None if not self._timed else self._first - self.scheduled_at_s

    @property
    def ttft_sent_s(self) -> float | None:
        return None if not self._timed else self._first - self.sent_at_s

    @property
    def tpot_s(self) -> float | None:
        """(last token − first token)/(tokens − 1); ``None`` below two tokens."""
        if not self._timed or self.finished_at_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.finished_at_s - self._first) / ((self.output_tokens or 0) - 1)

    @property
    def e2e_s(self) -> float | None:
        if not self.ok or self.finished_at_s is None:
            return None
        return self.finished_at_s - self.scheduled_at_s

    @property
    def effective_new_tokens(self) -> int | None:
        """Prompt − cached, by the server's counts."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    @property
    def _timed(self) -> bool:
        return self.ok and not self.whole

    @property
    def _first(self) -> float:
        assert self.first_token_at_s is not None
        return self.first_token_at_s


COLUMNS = tuple(f.name for f in fields(TurnRecord))
"""Column names of the Parquet form, in order."""
