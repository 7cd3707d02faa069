"""A topology of simulated nodes: routes, hand-offs, links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppdbench.core.decision import Route
from ppdbench.core.topology import Topology
from ppdbench.sim.config import LINKS, SimConfig
from ppdbench.sim.costs import CostTables
from ppdbench.sim.kernel import Kernel
from ppdbench.sim.node import Node, Sequence
from ppdbench.sim.prefix_cache import PrefixCache
from ppdbench.sim.step_log import Span, StepLog


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one node holds: KV blocks, bytes of KV per token, the longest sequence."""

    blocks: int
    kv_bytes_per_token: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV of ``tokens`` on its way between two nodes."""

    source: str
    target: str
    from_s: float
    to_s: float
    tokens: int


@dataclass(slots=True)
class Request:
    """One turn on its way through the cluster; ``on_done`` is called at its last token.

    ``matching_tokens`` of the prompt are the tokens that nodes which served this conversation
    before have seen. The fields after ``on_done`` are the cluster's.
    """

    conversation: str
    route: Route
    home: str
    prompt_tokens: int
    output_tokens: int
    matching_tokens: int
    on_done: Callable[[Request], None]
    prefill_node: str | None = None
    error: str = ""
    cached_tokens: int = 0
    moved_tokens: int = 0
    first_token_at_s: float = 0.0
    finished_at_s: float = 0.0
    prefill_sequence: Sequence | None = None
    spans: list[Span] = field(default_factory=list)


class SimCluster:
    """Nodes of one topology on one kernel; several clusters in a process share nothing.

    With ``keep_steps`` the nodes log their steps, and ``transfers`` lists what moved.
    """

    def __init__(  # noqa: PLR0913 - what a cluster is made of
        self,
        topology: Topology,
        config: SimConfig,
        kernel: Kernel,
        costs: CostTables,
        capacity: Capacity,
        *,
        keep_steps: bool = False,
    ) -> None:
        self.config, self.capacity, self._kernel = config, capacity, kernel
        self.nodes = {
            spec.name: Node(
                spec.name,
                kernel,
                self._costs_of(spec.name, costs),
                PrefixCache(capacity.blocks, config.block_tokens, enabled=config.prefix_caching),
                overheads=config.overheads,
                max_batched_tokens=config.max_batched_tokens,
                max_sequences=config.max_sequences,
                log=StepLog() if keep_steps else None,
            )
            for spec in topology.nodes
        }
        self.outstanding_prefill = dict.fromkeys(self.nodes, 0)
        self.transfers: list[Transfer] = []
        self._keep_steps = keep_steps
        self._open = 0
        self._connector = config.hand_off
        self._bytes_per_s = LINKS[config.link]
        self._sends_until = dict.fromkeys(self.nodes, 0.0)
        self._receives_until = dict.fromkeys(self.nodes, 0.0)

    def _costs_of(self, node: str, costs: CostTables) -> CostTables:
        straggler = self.config.straggler
        if straggler is None or straggler.node != node:
            return costs
        return costs.slowed(straggler.slowdown)

    def submit(self, request: Request) -> None:
        """Start a request now. One that can never run ends at once with ``error``."""
        request.error = self._refusal(request)
        if request.error:
            request.finished_at_s = self._kernel.now_s
            request.on_done(request)
            return
        overheads = self.config.overheads
        self._open += 1
        ready_s = self._kernel.now_s + overheads.request_s + overheads.open_request_s * self._open
        if request.prefill_node is None:
            self._kernel.at(ready_s, self._compute_at_home, request)
        else:
            self.outstanding_prefill[request.prefill_node] += request.prompt_tokens
            self._kernel.at(ready_s, self._compute_on_p, request)

    def running(self, node: str) -> int:
        return len(self.nodes[node].running)

    def _refusal(self, request: Request) -> str:
        total = request.prompt_tokens + request.output_tokens
        limit = min(self.capacity.context_tokens, self.capacity.blocks * self.config.block_tokens)
        if total <= limit:
            return ""
        return f"prompt and output are {total} tokens, the node takes {limit}"

    def _compute_at_home(self, request: Request) -> None:
        sequence = Sequence(
            request.conversation,
            request.prompt_tokens,
            request.output_tokens,
            on_done=self._done_at_home,
            matching_tokens=request.matching_tokens,
            owner=request,
        )
        self.nodes[request.home].submit(sequence)

    def _compute_on_p(self, request: Request) -> None:
        assert request.prefill_node is not None
        pull = request.route is Route.PULL
        sequence = Sequence(
            request.conversation,
            request.prompt_tokens,
            1,
            on_done=self._prefilled,
            matching_tokens=request.matching_tokens,
            fetch=self._pull_from_home if pull else None,
            hold=True,
            stall_s=self._connector.send_s + self._connector.send_token_s * request.prompt_tokens,
            owner=request,
        )
        self.nodes[request.prefill_node].submit(sequence)

    def _pull_from_home(self, sequence: Sequence) -> None:
        """P has reserved its blocks: read what the home still has beyond P's own."""
        request = _request(sequence)
        assert request.prefill_node is not None
        cache = self.nodes[request.home].cache
        usable = min(request.matching_tokens, request.prompt_tokens - 1)
        have = cache.hit_blocks(request.conversation, usable) * cache.block_tokens
        pulled = max(0, have - sequence.cached_tokens)
        sequence.cached_tokens += pulled
        request.moved_tokens += pulled
        done_s = self._transfer(request.home, request.prefill_node, pulled)
        self._kernel.at(done_s, self._pulled, sequence)

    def _pulled(self, sequence: Sequence) -> None:
        request = _request(sequence)
        assert request.prefill_node is not None
        self.nodes[request.prefill_node].kv_arrived(sequence, sequence.cached_tokens)

    def _prefilled(self, sequence: Sequence) -> None:
        request = _request(sequence)
        assert request.prefill_node is not None
        self.outstanding_prefill[request.prefill_node] -= request.prompt_tokens
        request.prefill_sequence = sequence
        request.cached_tokens = sequence.cached_tokens
        ready_s = self._kernel.now_s + self._connector.hop_s
        if self._connector.synchronous:
            request.moved_tokens += request.prompt_tokens
            ready_s = self._connector.hop_s + self._push(request)
        self._kernel.at(ready_s, self._decode_on_home, request)

    def _push(self, request: Request) -> float:
        assert request.prefill_node is not None
        return self._transfer(request.prefill_node, request.home, request.prompt_tokens)

    def _decode_on_home(self, request: Request) -> None:
        synchronous = self._connector.synchronous
        if synchronous:
            self._release_prefill(request)
        sequence = Sequence(
            request.conversation,
            request.prompt_tokens,
            request.output_tokens,
            on_done=self._done_at_home,
            matching_tokens=request.matching_tokens,
            fetch=None if synchronous else self._fetch,
            stall_s=self._connector.receive_s
            + self._connector.receive_token_s * request.prompt_tokens,
            loaded=synchronous,
            owner=request,
        )
        self.nodes[request.home].submit(sequence)

    def _fetch(self, sequence: Sequence) -> None:
        """D has reserved its blocks: move what it lacks."""
        request = _request(sequence)
        assert request.prefill_node is not None
        lacking = request.prompt_tokens - sequence.cached_tokens
        request.moved_tokens += lacking
        done_s = self._transfer(request.prefill_node, request.home, lacking)
        self._kernel.at(done_s, self._fetched, sequence)

    def _transfer(self, source: str, target: str, tokens: int) -> float:
        """When a transfer that is ready now ends; ports serve one transfer after the other."""
        start = max(self._kernel.now_s, self._sends_until[source], self._receives_until[target])
        wire_s = tokens * self.capacity.kv_bytes_per_token / self._bytes_per_s
        self._sends_until[source] = self._receives_until[target] = start + wire_s
        connector = self._connector
        end = start + wire_s + connector.transfer_s + connector.token_s * tokens
        if self._keep_steps:
            self.transfers.append(Transfer(source, target, start, end, tokens))
        return end

    def _fetched(self, sequence: Sequence) -> None:
        request = _request(sequence)
        self._release_prefill(request)
        self.nodes[request.home].kv_arrived(sequence, request.prompt_tokens - 1)

    def _release_prefill(self, request: Request) -> None:
        assert request.prefill_node is not None
        assert request.prefill_sequence is not None
        self.nodes[request.prefill_node].release(request.prefill_sequence)

    def _done_at_home(self, sequence: Sequence) -> None:
        self._open -= 1
        request = _request(sequence)
        if request.prefill_node is None:
            request.cached_tokens = sequence.cached_tokens
        request.first_token_at_s = sequence.first_token_at_s
        request.finished_at_s = sequence.finished_at_s
        request.spans = sequence.spans
        request.on_done(request)


def _request(sequence: Sequence) -> Request:
    assert isinstance(sequence.owner, Request)
    return sequence.owner
