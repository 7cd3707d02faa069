"""Everything a simulated cluster depends on, with a plain-dictionary form for manifests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ppdbench.core.errors import UsageError


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

    def host_s(self, sequences: int) -> float:
        together_s = self.sequence_s * sequences
        if self.sequence_cap_s is not None:
            together_s = min(self.sequence_cap_s, together_s)
        return self.step_s + together_s


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
        UsageError: ``slowdown`` is not a positive number.
    """

    node: str
    slowdown: float

    def __post_init__(self) -> None:
        if not (isinstance(self.slowdown, int | float) and self.slowdown > 0):
            raise UsageError(f"straggler slowdown {self.slowdown!r}: take a number above 0, as 2.4")

    @classmethod
    def from_dict(cls, values: object) -> Straggler:
        """Raises UsageError for anything but a name and a slowdown."""
        if not isinstance(values, dict) or values.keys() != {"node", "slowdown"}:
            raise UsageError(
                f'straggler {values!r}: give both of its values, as {{node = "r0", slowdown = 2.4}}'
            )
        return cls(values["node"], values["slowdown"])


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
        _known("connector", self.connector, CONNECTORS)
        _known("link", self.link, LINKS)
        if not 0 <= self.retokenisation_loss <= 1:
            raise UsageError(
                f"retokenisation loss {self.retokenisation_loss}: a chance per token lies in [0, 1]"
            )

    @property
    def hand_off(self) -> Connector:
        """The connector's profile."""
        return self.connector_profile or CONNECTORS[self.connector]

    def as_dict(self) -> dict[str, Any]:
        """Plain values only; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SimConfig:
        made = dict(values)
        made["overheads"] = Overheads(**values.get("overheads", {}))
        if values.get("connector_profile") is not None:
            made["connector_profile"] = Connector(**values["connector_profile"])
        if values.get("straggler") is not None:
            made["straggler"] = Straggler.from_dict(values["straggler"])
        return cls(**made)


def _known(what: str, name: str, table: dict[str, Any]) -> None:
    if name not in table:
        raise UsageError(f"unknown {what} {name!r}; known: {', '.join(sorted(table))}")
