"""Small greedy requests through every route of a live cluster, before and after it is measured.

Each canary is a two-turn conversation in token ids. Whatever the route, the second answer must be
the one that a single node computes from nothing (a fresh ``cache_salt``): wrong KV comes with
HTTP 200 and shows only here.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppdbench.cluster import control, nixl
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.decision import Route
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import Role

HAND_OFF_LIMIT_S = 10.0
_REQUEST_LIMIT_S = 60.0
_PREFLIGHT_WITHIN_S = 180.0
_RETRY_S = 0.25
_TOKEN_RANGE = (10, 1000)
"""Ids that every real vocabulary has as ordinary tokens."""
_LASTING_STATUSES = frozenset(range(400, 500)) - {408, 429}
BLIND = "every prompt got the same answer, so wrong KV would not show; are these dummy weights?"


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished canary turn. ``held`` is D's offer for a later pull, if it made one."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    cached_tokens: int | None
    prefill_cached_tokens: int | None
    held: nixl.HeldKv | None


@dataclass(frozen=True, slots=True)
class Path:
    """A way to serve a turn: ``node`` answers, ``prefill`` computes first where there is one."""

    route: Route
    node: Node
    prefill: Node | None = None

    def __str__(self) -> str:
        return f"{self.route} {f'{self.prefill.name}→' if self.prefill else ''}{self.node.name}"


class Prober:
    """Asks a cluster canary turns. ``model`` is the served name; prompts come from ``seed``.

    Each request is given up after ``limit_s``.
    """

    def __init__(self, model: str, seed: int = 0, limit_s: float = _REQUEST_LIMIT_S) -> None:
        self._model = model
        self._limit_s = limit_s
        self._random = random.Random(seed)

    def __repr__(self) -> str:
        return f"<Prober of {self._model}>"

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(*_TOKEN_RANGE) for _ in range(count))

    def ask(
        self,
        path: Path,
        prompt_ids: Sequence[int],
        output_tokens: int,
        *,
        pull_from: nixl.HeldKv | None = None,
        cold: bool = False,
    ) -> Answer:
        """One turn over ``path``; ``cold`` keeps it out of every prefix cache.

        Raises:
            EngineError: a node refused or did not answer.
        """
        body = self._body(prompt_ids, output_tokens, cold=cold)
        sent, prefilled = self._through_prefill(path, body, pull_from)
        answer = control.post(path.node, "/v1/completions", sent, self._limit_s)
        output_ids = _output_ids(path.node, answer)
        return Answer(
            tuple(prompt_ids),
            output_ids,
            nixl.cached_tokens(answer.get("usage") or {}),
            prefilled.cached_tokens if prefilled else None,
            nixl.held_kv(answer, prompt_ids, output_ids),
        )

    def hand_off_s(self, path: Path, prompt_ids: Sequence[int], output_tokens: int) -> float:
        """How long one turn over ``path`` takes, whatever its answer says.

        Raises:
            EngineError: a node refused or did not answer.
        """
        begun = time.monotonic()
        sent, _ = self._through_prefill(
            path, self._body(prompt_ids, output_tokens, cold=False), None
        )
        control.post(path.node, "/v1/completions", sent, self._limit_s)
        return time.monotonic() - begun

    def _through_prefill(
        self, path: Path, body: dict[str, Any], pull_from: nixl.HeldKv | None
    ) -> tuple[dict[str, Any], nixl.Prefilled | None]:
        if path.prefill is None:
            return nixl.local_body(body), None
        asked = nixl.prefill_body(body, pull_from)
        prefilled = nixl.read_prefilled(
            control.post(path.prefill, "/v1/completions", asked, self._limit_s)
        )
        return nixl.decode_body(body, prefilled), prefilled

    def _body(self, prompt_ids: Sequence[int], output_tokens: int, *, cold: bool) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return body | {"cache_salt": uuid.uuid4().hex} if cold else body


def _output_ids(node: Node, answer: Mapping[str, Any]) -> tuple[int, ...]:
    match answer.get("choices"):
        case [{"token_ids": [*ids]}, *_]:
            return tuple(ids)
    raise EngineError(
        f"node {node.name} at {node.url} answered a canary without token ids, so no route can be "
        "compared; it must know return_token_ids, as vLLM does"
    )


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """Sizes of a canary. The first ``agree_tokens`` greedy tokens must be equal.

    Not all of them: a GPU's kernels may differ with the shape of a batch, so a greedy answer may
    part late. Wrong KV parts at once.
    """

    prompt_tokens: int = 200
    new_tokens: int = 20
    output_tokens: int = 12
    agree_tokens: int = 4


def paths_of(cluster: ClusterSpec, *, pull: bool) -> list[Path]:
    """Every way a later turn can go: each P to each D, each D alone, each R."""
    prefill = [node for node in cluster.nodes if node.role is Role.P]
    paths = []
    for home in (node for node in cluster.nodes if node.role.decodes):
        if home.role is Role.R:
            paths.append(Path(Route.REPLICA, home))
            continue
        routes = (Route.REMOTE, Route.PULL) if pull else (Route.REMOTE,)
        paths += [Path(route, home, p) for p in prefill for route in routes]
        paths.append(Path(Route.LOCAL, home))
    return paths


def check_canaries(  # noqa: PLR0913  (what is checked, and who is told)
    cluster: ClusterSpec,
    model: str,
    *,
    pull: bool = False,
    only: int | None = None,
    plan: CanaryPlan | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """What is wrong with the cluster, path by path; empty when every route computes the same.

    ``only`` checks a single path, number ``only`` modulo their count. ``notice`` is told where the
    comparison cannot fail.

    Raises:
        EngineError: a node does not answer at all.
    """
    prober = Prober(model, seed=random.SystemRandom().randrange(2**32))
    paths = paths_of(cluster, pull=pull)
    chosen = paths if only is None else [paths[only % len(paths)]]
    answers: list[tuple[int, ...]] = []
    problems = [
        problem
        for path in chosen
        for problem in _check_path(prober, path, cluster, plan or CanaryPlan(), answers)
    ]
    if len(answers) > 1 and len(set(answers)) == 1:
        notice(BLIND)
    return problems


def _check_path(
    prober: Prober,
    path: Path,
    cluster: ClusterSpec,
    plan: CanaryPlan,
    answers: list[tuple[int, ...]],
) -> Iterator[str]:
    """``answers`` gets those to the different prompts that were sent."""
    first = _first_turn(prober, path, cluster, plan)
    prompt = (*first.prompt_ids, *first.output_ids, *prober.tokens(plan.new_tokens))
    refusal = nixl.pull_refusal(first.held, prompt) if path.route is Route.PULL else None
    if refusal is not None:
        yield f"{path}: D's KV cannot be pulled ({refusal}); start D with bidirectional_kv_xfer"
        return
    pull_from = first.held if path.route is Route.PULL else None
    warm = prober.ask(path, prompt, plan.output_tokens, pull_from=pull_from)
    alone = prober.ask(Path(Route.LOCAL, path.node), prompt, plan.output_tokens, cold=True)
    answers += (first.output_ids, alone.output_ids)
    yield from differences(path, warm.output_ids, alone.output_ids, plan.agree_tokens)


def _first_turn(prober: Prober, path: Path, cluster: ClusterSpec, plan: CanaryPlan) -> Answer:
    """Turn 1 as a sweep sends it: over a P where there is one."""
    prefill = path.prefill or next((n for n in cluster.nodes if n.role is Role.P), None)
    if path.node.role is Role.R:
        prefill = None
    before = Path(Route.REMOTE if prefill else path.route, path.node, prefill)
    return prober.ask(before, prober.tokens(plan.prompt_tokens), plan.output_tokens)


def differences(
    path: Path, got: Sequence[int], wanted: Sequence[int], agree_tokens: int
) -> Iterator[str]:
    """A sentence when ``got`` leaves ``wanted`` within the first ``agree_tokens``."""
    for position, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if position < agree_tokens and one != other:
            yield (
                f"{path}: greedy token {position + 1} is {one}, a node alone computes {other}; "
                "the KV that was used is not this conversation's"
            )
            return
    if min(len(got), len(wanted)) < agree_tokens:
        yield f"{path}: {len(got)} and {len(wanted)} tokens came, {agree_tokens} were to agree"


def preflight(
    cluster: ClusterSpec,
    model: str,
    limit_s: float = HAND_OFF_LIMIT_S,
    *,
    ended: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """A tiny request from every P to every D and its repetition, each within ``limit_s``.

    The first makes the two nodes shake hands, for which vLLM allows itself few seconds. On a busy
    machine that may fail, or end after P's lease, and then that request never returns though the
    next one passes. So an attempt is given up after ``limit_s``, and a pair has three minutes in
    which two in a row must be good. A firewall or a wrong network interface fails all of them.
    ``ended`` gives the reasons of nodes that are known to have died, which nothing waits for, and
    nothing waits for an answer that would be the same again (:func:`_is_lasting`).

    Raises:
        EngineError: a pair does not get there, or a node has ended.
    """
    prober = Prober(model, random.SystemRandom().randrange(2**32), limit_s)
    for path in paths_of(cluster, pull=False):
        if path.route is Route.REMOTE:
            _preflight_path(prober, path, limit_s, ended)


def _preflight_path(
    prober: Prober, path: Path, limit_s: float, ended: Callable[[], Mapping[str, str]]
) -> None:
    good, trouble = 0, ""
    deadline_s = time.monotonic() + _PREFLIGHT_WITHIN_S
    while time.monotonic() < deadline_s:
        problem = _hand_off_problem(prober, path, limit_s)
        good, trouble = (good + 1, trouble) if problem is None else (0, problem)
        if good == 2:
            return
        for reason in ended().values():
            raise EngineError(reason)
        time.sleep(0 if good else _RETRY_S)
    raise EngineError(
        f"preflight {path}: {trouble}; two hand-offs in a row within {limit_s:g} s are needed. "
        "Check the network between the two nodes (UCX_NET_DEVICES, VLLM_NIXL_SIDE_CHANNEL_HOST, "
        "a firewall), their logs and the machine's load"
    )


def _hand_off_problem(prober: Prober, path: Path, limit_s: float) -> str | None:
    try:
        elapsed_s = prober.hand_off_s(path, prober.tokens(32), 2)
    except EngineError as error:
        if _is_lasting(error):
            raise EngineError(f"preflight {path}: {error}") from error
        return str(error)
    return None if elapsed_s <= limit_s else f"a hand-off took {elapsed_s:.1f} s"


def _is_lasting(error: EngineError) -> bool:
    """Whether a node answered, and would answer the same again: a wrong key, no connector."""
    if isinstance(error, control.NodeError):
        return error.status is not None and error.status in _LASTING_STATUSES
    return True
