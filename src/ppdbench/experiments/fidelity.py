"""How well the simulator predicts somebody else's measured sweep.

The PPD authors' harness is emulated, not ours: their proxy's placement and its lost identities,
fifty client connections, ten seconds of arrivals, nominal prompt lengths that are not the true
ones. What is unknown about their set-up is one :class:`Guess` for all points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.decision import Decision, Features, Route
from ppdbench.core.seeds import rng_for, unit_interval
from ppdbench.core.topology import NodeSpec, Role, Topology
from ppdbench.load.conversation import Dialogue, Play
from ppdbench.load.simulated import run_simulated_point
from ppdbench.runs.importers import TURN_1, TURN_2
from ppdbench.runs.records import TurnRecord
from ppdbench.sim.config import Connector, Overheads, SimConfig

CONNECTIONS = 50
ARRIVALS_S = 10.0
FITTED_ON = ("4R", "2P_2D", "2P_2pD")
METRICS = ("ttft_s", "tpot_s")


@dataclass(frozen=True, slots=True)
class Guess:
    """Every number that is fitted, one value for all topologies, workloads and rates.

    ``prompt_scale`` is true over nominal prompt tokens. ``loss`` is the re-tokenisation loss per
    reply token. ``identity_lost`` is the share of Turn 2 that the authors' proxy takes for a new
    conversation; 0.22 follows from its code and their prompts, replies add to it. The ``hop``,
    ``send`` and ``receive`` fields describe the P2pNccl connector.
    """

    step_s: float = 1.5e-3
    sequence_s: float = 0.06e-3
    sequence_cap_s: float = 4e-3
    request_s: float = 18e-3
    open_request_s: float = 0.2e-3
    compute_factor: float = 1.5
    prompt_scale: float = 1.2
    loss: float = 0.01
    hop_s: float = 45e-3
    hop_token_s: float = 8e-6
    send_s: float = 15e-3
    send_token_s: float = 5e-6
    receive_token_s: float = 1e-6
    identity_lost: float = 0.23

    def config(self) -> SimConfig:
        """The authors' cluster: vLLM 0.13's defaults on H100, P2pNccl over NVLink."""
        connector = Connector(
            "p2p_nccl",
            self.hop_s,
            0.0,
            self.hop_token_s,
            synchronous=True,
            can_pull=False,
            send_s=self.send_s,
            send_token_s=self.send_token_s,
            receive_token_s=self.receive_token_s,
        )
        return SimConfig(
            compute_factor=self.compute_factor,
            connector="p2p_nccl",
            connector_profile=connector,
            link="free",
            overheads=Overheads(
                self.step_s,
                self.sequence_s,
                self.sequence_cap_s,
                self.request_s,
                self.open_request_s,
            ),
            gpu_memory_utilization=0.85,
            max_context_tokens=8192,
            retokenisation_loss=self.loss,
        )

    def scaled(self, name: str, factor: float) -> Guess:
        return replace(self, **{name: getattr(self, name) * factor})


PARAMETERS = tuple(field.name for field in fields(Guess))


class AuthorsPlay(Play):
    """Their proxy: homes and P's by hash, and a Turn 2 that may be taken for a new conversation."""

    identity_lost = 0.0

    def __init__(self, topology: Topology, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(topology, *args, **kwargs)
        self._homes = _slots(topology)
        self._prefills = topology.prefill_nodes

    def begin(self, conversation: Conversation, at_s: float) -> Dialogue:
        dialogue = Dialogue(conversation, self._homes[0], at_s)
        self._place(dialogue, conversation.id)
        return dialogue

    def send(self, dialogue: Dialogue, now_s: float) -> TurnRecord:
        key = f"{dialogue.conversation.id}/{dialogue.turn}"
        if dialogue.turn > 1 and _lost(key, self.identity_lost):
            self._place(dialogue, key)
        return super().send(dialogue, now_s)

    def _place(self, dialogue: Dialogue, key: str) -> None:
        lot = int(unit_interval(f"{key}/hash") * 2**52)
        dialogue.home = self._homes[lot % len(self._homes)]
        if self._prefills:
            dialogue.prefill_node = self._prefills[lot % len(self._prefills)]


@dataclass(frozen=True, slots=True)
class AuthorsPolicy:
    """By role, except that a lost Turn 2 goes the way of a first turn."""

    identity_lost: float
    name: str = "authors"

    def decide(self, features: Features, home: Role) -> Decision:
        if home is Role.PD and not _lost(features.key, self.identity_lost):
            return Decision(Route.LOCAL, "role")
        return Decision(Route.REMOTE, "role")


def _lost(key: str, share: float) -> bool:
    return unit_interval(f"{key}/identity") < share


def _slots(topology: Topology) -> Sequence[NodeSpec]:
    """The order in which their proxy counts nodes: replicas, then pD before D beside replicas."""
    order = {Role.R: 0, Role.PD: 1, Role.D: 2}
    if not topology.count(Role.R):
        order = {Role.D: 0, Role.PD: 1}
    return sorted(topology.homes, key=lambda node: order[node.role])


def authors_arrivals(point: Mapping[str, Any], scale: float, seed: int) -> list[Arrival]:
    """As many conversations as they had, at Poisson times given that number."""
    rng = rng_for(seed, point["workload"], point["rate_per_s"])
    times = sorted(rng.uniform(0.0, ARRIVALS_S, point["turn1"]["n"]).tolist())
    first, second = point["workload"].split("_", 1)
    turns = tuple(
        Turn(max(1, round(scale * new)), output) for new, output in (TURN_1[first], TURN_2[second])
    )
    return [Arrival(at_s, Conversation(f"c{i}", turns)) for i, at_s in enumerate(times)]


def predict(point: Mapping[str, Any], guess: Guess, seeds: Iterable[int]) -> dict[str, Any]:
    """The point's medians as the simulator sees them, each the mean over ``seeds``."""
    config = guess.config()
    runs = [_medians(point, guess, config, seed) for seed in seeds]
    return {
        turn: {
            metric: sum(run[turn][metric] for run in runs) / len(runs) for metric in runs[0][turn]
        }
        for turn in ("turn1", "turn2plus")
    }


def _medians(
    point: Mapping[str, Any], guess: Guess, config: SimConfig, seed: int
) -> dict[str, dict[str, float]]:
    def play(*args: Any, **kwargs: Any) -> AuthorsPlay:  # noqa: ANN401
        made = AuthorsPlay(*args, **kwargs)
        made.identity_lost = guess.identity_lost
        return made

    outcome = run_simulated_point(
        Topology.parse(point["topology"]),
        AuthorsPolicy(guess.identity_lost),
        authors_arrivals(point, guess.prompt_scale, seed),
        point["rate_per_s"],
        config,
        seed,
        make_play=play,
        connections=CONNECTIONS,
    )
    by_turn: dict[str, Callable[[TurnRecord], bool]] = {
        "turn1": lambda record: record.turn == 1,
        "turn2plus": lambda record: record.turn > 1,
    }
    medians = {
        name: {
            metric: median(getattr(r, metric) for r in outcome.records if wanted(r))
            for metric in METRICS
        }
        for name, wanted in by_turn.items()
    }
    later = [r.ttft_s or 0.0 for r in outcome.records if r.turn > 1]
    medians["turn2plus"]["ttft_mean_s"] = sum(later) / len(later)
    return medians
