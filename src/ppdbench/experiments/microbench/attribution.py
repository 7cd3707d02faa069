"""The published interference test, and controls that take one suspect at a time away.

All requests of a batch are sent at once: b decodes over one shared, cached prefix, and N prompts
beside them. A control changes one thing. How much of the published gap between full and append
goes with it is the part that this thing explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ppdbench.core.seeds import unit_interval
from ppdbench.experiments.microbench.script import Ask, Segment
from ppdbench.experiments.microbench.simulated import SHARED

OWN_TOKENS = 16
"""A decode's own prompt after the prefix: a label and four random tokens in the original."""

SPREAD_S = 0.010
"""Firing a batch takes a client some time; each request falls somewhere in this span."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the test.

    ``append_tokens`` and ``full_tokens`` are the new tokens of each kind. ``shared_by_full`` is how
    much of the prefix the full prompt begins with. ``distinct`` gives each decode, and the append,
    a prefix of its own. ``cascade`` is cascade attention.
    """

    name: str
    prefix_tokens: int = 2048
    full_tokens: int = 1024
    append_tokens: int = 1024
    output_tokens: int = 64
    injected_output_tokens: int = 64
    shared_by_full: int = 0
    distinct: bool = False
    cascade: bool = True


PUBLISHED = Form("published")
JANUARY = replace(PUBLISHED, name="january", append_tokens=128)
"""The raw run of January 2026 appended 128 tokens against a full prompt of 1,024."""

CONTROLS = (
    replace(PUBLISHED, name="cascade_off", cascade=False),
    replace(PUBLISHED, name="distinct_prefixes", distinct=True),
    replace(PUBLISHED, name="full_shares_half_the_prefix", shared_by_full=1024),
    replace(PUBLISHED, name="full_shares_the_prefix", shared_by_full=2048),
    replace(PUBLISHED, name="one_output_token", injected_output_tokens=1),
)
EQUAL_NEW_TOKENS = replace(PUBLISHED, name="equal_new_tokens")
"""January's control: both kinds compute 1,024 tokens, as the published form does."""

ARMS = ("base", "full", "append")


@dataclass(frozen=True, slots=True)
class Shot:
    """One batch that is sent at once; ``arm`` says what stands beside the decodes."""

    form: Form
    batch: int
    injected: int
    arm: str
    repeat: int

    @property
    def name(self) -> str:
        form = self.form
        return (
            f"{form.name}.p{form.prefix_tokens}.b{self.batch}.n{self.injected}.{self.arm}"
            f".r{self.repeat}"
        )

    @property
    def kv_tokens(self) -> int:
        """Distinct tokens of KV that the shot holds at its fullest."""
        form = self.form
        own = self.batch * (OWN_TOKENS + form.output_tokens)
        prefixes = (self.batch + self.injected if form.distinct else 1) * form.prefix_tokens
        new = {"base": 0, "full": form.full_tokens, "append": form.append_tokens}[self.arm]
        return own + prefixes + self.injected * (new + form.injected_output_tokens)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        form = self.form
        return form.prefix_tokens + max(form.full_tokens, form.append_tokens) + form.output_tokens


class ShotScript:
    """Cache the prefixes, then fire everything."""

    def __init__(self, shot: Shot, seed: int) -> None:
        self.done = False
        self.wanted_pace = 0
        self._shot = shot
        self._seed = seed
        self._waiting: set[str] = set()
        self._fired = False

    def begin(self) -> list[Ask]:
        asks = list(self._primes())
        self._waiting = {ask.name for ask in asks}
        return asks

    def progressed(self, pace: int) -> list[Ask]:  # noqa: ARG002
        return []

    def ended(self, name: str) -> list[Ask]:
        self._waiting.discard(name)
        if self._waiting:
            return []
        if self._fired:
            self.done = True
            return []
        self._fired = True
        asks = [*self._decodes(), *self._injections()]
        self._waiting = {ask.name for ask in asks}
        return asks

    def _primes(self) -> Iterator[Ask]:
        """The longest of each prefix; a shorter front of it is cached with it."""
        longest: dict[str, Segment] = {}
        for ask in (*self._decodes(), *self._injections()):
            for segment in ask.prompt[:-1]:
                known = longest.get(segment.name, segment)
                longest[segment.name] = max(known, segment, key=lambda s: s.tokens)
        for segment in longest.values():
            yield Ask(f"{self._shot.name}.prime.{segment.name}", (segment,), 1)

    def _decodes(self) -> list[Ask]:
        return [self._decode(i) for i in range(self._shot.batch)]

    def _decode(self, place: int) -> Ask:
        name = f"{self._shot.name}.victim{place}"
        prompt = (self._prefix(name), Segment(f"own/{name}", OWN_TOKENS))
        return Ask(name, prompt, self._shot.form.output_tokens, self._delay_s(name))

    def _injections(self) -> list[Ask]:
        count = 0 if self._shot.arm == "base" else self._shot.injected
        return [self._injection(i) for i in range(count)]

    def _injection(self, place: int) -> Ask:
        shot, form = self._shot, self._shot.form
        name = f"{shot.name}.dose{place}"
        if shot.arm == "append":
            prompt = [self._prefix(name), Segment(f"new/{name}", form.append_tokens)]
        else:
            head = self._front_of_prefix()
            prompt = [*head, Segment(f"new/{name}", form.full_tokens)]
        delay_s = self._delay_s(name)
        return Ask(name, tuple(prompt), form.injected_output_tokens, delay_s)

    def _prefix(self, owner: str) -> Segment:
        tokens = self._shot.form.prefix_tokens
        if self._shot.form.distinct:
            return Segment(f"prefix/{owner}", tokens)
        return Segment(f"{SHARED}{tokens}", tokens)

    def _front_of_prefix(self) -> list[Segment]:
        """The first part of the shared prefix: a segment's tokens begin alike at any length."""
        form = self._shot.form
        if not form.shared_by_full:
            return []
        return [Segment(f"{SHARED}{form.prefix_tokens}", form.shared_by_full)]

    def _delay_s(self, name: str) -> float:
        return SPREAD_S * unit_interval(f"delay/{name}", self._seed)


def shots(
    form: Form, batches: Sequence[int], injected: Sequence[int], repeats: int
) -> Iterator[Shot]:
    """Every arm of a form. The base stands once per batch and repeat."""
    for repeat, batch in product(range(repeats), batches):
        yield Shot(form, batch, 0, "base", repeat)
        for count, arm in product(injected, ("full", "append")):
            yield Shot(form, batch, count, arm, repeat)
