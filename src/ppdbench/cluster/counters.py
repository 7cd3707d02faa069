"""What a node counted, read from ``/metrics``; the evidence for which path a turn took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Self

from ppdbench.cluster import control
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.errors import EngineError

_TIMEOUT_S = 10.0

_TOTALS = {
    "computed_tokens": ("vllm:prompt_tokens_by_source_total", "local_compute"),
    "cache_hit_tokens": ("vllm:prompt_tokens_by_source_total", "local_cache_hit"),
    "received_tokens": ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"),
    "generated_tokens": ("vllm:generation_tokens_total", None),
    "finished_requests": ("vllm:request_success_total", None),
    "received_bytes": ("vllm:nixl_bytes_transferred_sum", None),
    "transfers": ("vllm:nixl_xfer_time_seconds_count", None),
    "transfer_s": ("vllm:nixl_xfer_time_seconds_sum", None),
    "failed_transfers": ("vllm:nixl_num_failed_transfers_total", None),
    "expired_hand_offs": ("vllm:nixl_num_kv_expired_reqs_total", None),
    "preemptions": ("vllm:num_preemptions_total", None),
}
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_use": "vllm:kv_cache_usage_perc",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the node started, or between two readings. ``None``: the node does not say.

    ``received_bytes`` and ``transfers`` count KV that this node read from another.
    """

    computed_tokens: float | None = None
    cache_hit_tokens: float | None = None
    received_tokens: float | None = None
    generated_tokens: float | None = None
    finished_requests: float | None = None
    received_bytes: float | None = None
    transfers: float | None = None
    transfer_s: float | None = None
    failed_transfers: float | None = None
    expired_hand_offs: float | None = None
    preemptions: float | None = None

    def since(self, before: Self) -> Counters:
        """What was counted after ``before``."""
        differences = {}
        for each in fields(self):
            now, then = getattr(self, each.name), getattr(before, each.name)
            differences[each.name] = None if now is None or then is None else now - then
        return Counters(**differences)


@dataclass(frozen=True, slots=True)
class Gauges:
    """The node's state at the reading; ``kv_use`` is a share of 1."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    counters: Counters
    gauges: Gauges


Readings = Mapping[str, Reading]
"""By node name."""


def read_metrics(text: str) -> Reading:
    """Parse a Prometheus exposition; the series of several engines in one node are added."""
    sums: dict[tuple[str, str | None], float] = {}
    for name, labels, value in _samples(text):
        for key in {(name, None), (name, labels.get("source"))}:
            sums[key] = sums.get(key, 0.0) + value
    return Reading(
        Counters(**{field: sums.get(key) for field, key in _TOTALS.items()}),
        Gauges(**{field: sums.get((name, None)) for field, name in _GAUGES.items()}),
    )


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def read_node(node: Node) -> Reading:
    """Read one node now.

    Raises:
        EngineError: it does not answer, or not with metrics.
    """
    text = control.get(node, node.metrics_url, _TIMEOUT_S)
    try:
        return read_metrics(text)
    except ValueError as error:
        raise EngineError(
            f"node {node.name} at {node.metrics_url} gives no Prometheus metrics ({error}); "
            "check metrics_url"
        ) from error


def read_nodes(cluster: ClusterSpec) -> dict[str, Reading]:
    """Read every node now, one after the other."""
    return {node.name: read_node(node) for node in cluster.nodes}
