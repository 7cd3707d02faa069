"""Everything a simulated cluster depends on, with a plain-dictionary form for manifests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from ppdbench.core.errors import UsageError
from ppdbench.sim import rules

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time outside the GPU's kernels. ``docs/simulator.md`` says where each default was fitted.

    A step costs ``step_s`` and ``sequence_s`` per running sequence up to ``sequence_cap_s``, or
    without a bound where that is ``None``.
    ``request_s`` stands once before each request (HTTP, tokenizer, the engine's hand-over), with
    ``open_request_s`` for each request then open in the cluster: one proxy process serves them all.
    """

    step_s: float = 1.33e-3
    sequence_s: float = 0.0468e-3
    sequence_cap_s: float | None = 10e-3
    request_s: float = 16.9e-3
    open_request_s: float = 0.0

    def __post_init__(self) -> None:
        rules.check("overheads", self, _OVERHEAD_RULES)

    def host_s(self, sequences: int) -> float:
        together_s = self.sequence_s * sequences
        if self.sequence_cap_s is not None:
            together_s = min(self.sequence_cap_s, together_s)
        return self.step_s + together_s


_OVERHEAD_RULES = {
    **dict.fromkeys(("step_s", "sequence_s", "request_s", "open_request_s"), rules.NOT_NEGATIVE),
    "sequence_cap_s": rules.NOT_NEGATIVE_OR_NONE,
}


@dataclass(frozen=True, slots=True)
class Connector:
    """How KV gets from P to D.

    ``hop_s`` stands between P's answer and D's request. A transfer costs ``transfer_s`` plus
    ``token_s`` per moved token plus the link's time. A ``synchronous`` connector pushes the whole
    prompt each turn, before D's request, and works inside the engines' own steps: P's step is
    longer by ``send_s`` and ``send_token_s`` per token of the prompt, D's by ``receive_s`` and
    ``receive_token_s``. The others move only the blocks that D lacks, beside D's steps.
    """

    name: str
    hop_s: float
    transfer_s: float
    token_s: float
    synchronous: bool
    can_pull: bool
    send_s: float = 0.0
    send_token_s: float = 0.0
    receive_s: float = 0.0
    receive_token_s: float = 0.0

    def __post_init__(self) -> None:
        rules.check("connector_profile", self, _CONNECTOR_RULES)


_SECONDS_OF_A_HOP = (
    "hop_s", "transfer_s", "token_s", "send_s", "send_token_s", "receive_s", "receive_token_s",
)  # fmt: skip
_CONNECTOR_RULES = {
    "name": rules.TEXT,
    **dict.fromkeys(_SECONDS_OF_A_HOP, rules.NOT_NEGATIVE),
    **dict.fromkeys(("synchronous", "can_pull"), rules.SWITCH),
}


CONNECTORS = {
    "nixl": Connector("nixl", 10e-3, 1e-3, 0.0, synchronous=False, can_pull=True),
    "p2p_nccl": Connector(
        "p2p_nccl", 22.6e-3, 0.0, 2.08e-6, synchronous=True, can_pull=False,
        send_s=27.5e-3, send_token_s=3.8e-6, receive_s=4.5e-3, receive_token_s=1.13e-6,
    ),
}  # fmt: skip
"""``p2p_nccl`` is fitted to the PPD authors' sweep (its link is in ``token_s``: use link ``free``
to reproduce it). Nobody has measured ``nixl``'s hop on GPUs for us: 10 ms and 1 ms are assumed."""

LINKS = {"nvlink": 200e9, "ib_ndr": 50e9, "ib_hdr": 25e9, "eth_100g": 10e9, "free": float("inf")}
"""Bytes per second and direction of each node's port; ``free`` is for theory tests."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """One node that computes ``slowdown`` times slower; reading weights keeps its speed.

    A topology without a node of that name has no straggler.

    Raises:
        UsageError: ``slowdown`` is not a positive number, or ``node`` no name.
    """

    node: str
    slowdown: float

    def __post_init__(self) -> None:
        rules.check("straggler", self, _STRAGGLER_RULES)

    @classmethod
    def from_dict(cls, values: object) -> Straggler:
        """Raises UsageError for anything but a name and a slowdown."""
        if not isinstance(values, dict) or values.keys() != {"node", "slowdown"}:
            raise UsageError(
                f'straggler {values!r}: give both of its values, as {{node = "r0", slowdown = 2.4}}'
            )
        return cls(values["node"], values["slowdown"])


_STRAGGLER_RULES = {
    "node": rules.Rule(rules.TEXT.takes, 'a node\'s name, as "r0"'),
    "slowdown": rules.Rule(rules.POSITIVE.takes, "a number above 0, as 2.4"),
}


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One kind of node, used for every node of the topology, but for a ``straggler``.

    ``costs`` names the source: ``measured``, ``roofline`` or the path of a calibration file.
    ``compute_factor`` stretches compute-bound work (prompts) against the source.
    ``connector_profile`` replaces the profile that ``connector`` names. ``retokenisation_loss`` is
    the chance per reply token that the history, sent back as text, encodes to other tokens from
    there on; 0 is a history of token ids. ``token_times`` records when each token came, for
    inter-token latencies; it doubles the cost of a point.

    Raises:
        UsageError: an unknown connector or link, or a number out of range.
    """

    gpu: str = "h100_sxm"
    model: str = "meta-llama/Meta-Llama-3.1-8B"
    costs: str = "measured"
    compute_factor: float = 1.47
    connector: str = "nixl"
    connector_profile: Connector | None = None
    link: str = "nvlink"
    overheads: Overheads = field(default_factory=Overheads)
    max_batched_tokens: int = 8192
    max_sequences: int = 1024
    block_tokens: int = 16
    gpu_memory_utilization: float = 0.9
    max_context_tokens: int | None = None
    prefix_caching: bool = True
    retokenisation_loss: float = 0.0
    token_times: bool = False
    straggler: Straggler | None = None

    def __post_init__(self) -> None:
        rules.check("setting", self, _SETTING_RULES)
        _known("connector", self.connector, CONNECTORS)
        _known("link", self.link, LINKS)

    @property
    def hand_off(self) -> Connector:
        """The connector's profile."""
        return self.connector_profile or CONNECTORS[self.connector]

    def as_dict(self) -> dict[str, Any]:
        """Plain values only; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SimConfig:
        """Raises UsageError for a table that lacks a value, or has one that is not known."""
        made = dict(values)
        made["overheads"] = _of_table(Overheads, "overheads", values.get("overheads", {}))
        if (profile := values.get("connector_profile")) is not None:
            made["connector_profile"] = _of_table(Connector, "connector_profile", profile)
        if (straggler := values.get("straggler")) is not None:
            made["straggler"] = Straggler.from_dict(straggler)
        return cls(**made)


_SETTING_RULES = {
    **dict.fromkeys(("gpu", "model", "costs", "connector", "link"), rules.TEXT),
    "compute_factor": rules.POSITIVE,
    **dict.fromkeys(("max_batched_tokens", "block_tokens"), rules.TOKENS),
    "max_sequences": rules.COUNT,
    "gpu_memory_utilization": rules.SHARE,
    "max_context_tokens": rules.COUNT_OR_NONE,
    "retokenisation_loss": rules.SHARE,
    **dict.fromkeys(("prefix_caching", "token_times"), rules.SWITCH),
}


def _of_table(kind: type[T], setting: str, values: object) -> T:
    try:
        return kind(**values)  # type: ignore[arg-type]
    except TypeError as error:
        names = ", ".join(f.name for f in fields(kind))  # type: ignore[arg-type]
        raise UsageError(f"setting {setting} is {values!r}; expected a table of {names}") from error


def _known(what: str, name: str, table: dict[str, Any]) -> None:
    if name not in table:
        raise UsageError(f"unknown {what} {name!r}; known: {', '.join(sorted(table))}")
