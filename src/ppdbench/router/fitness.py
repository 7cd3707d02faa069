"""Whether a table was measured on what stands behind the router now."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppdbench.cluster.contract import NOT_AN_ENGINE, ClusterSpec, Node
from ppdbench.core.errors import UsageError
from ppdbench.http.client import Pool
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Headers, Origin, Request, Response

_BLOCK_SIZE = re.compile(rb'vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"')
ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LiveFacts:
    """What a node says of itself; empty or ``None`` where it says nothing."""

    node: str
    models: frozenset[str] = frozenset()
    engine_version: str | None = None
    block_size: int | None = None


def mismatches(provenance: Mapping[str, Any], facts: LiveFacts) -> list[str]:
    """One sentence per field in which a node differs from the table; unknown differs from nothing.

    No API tells the connector, the dtype or the GPU, so these are not compared.
    """
    found = []
    model = provenance.get("model")
    if model and facts.models and model not in facts.models:
        served = ", ".join(sorted(facts.models))
        found.append(f"model: the table's is {model!r}, node {facts.node} serves {served}")
    for name in ("engine_version", "block_size"):
        measured, live = provenance.get(name), getattr(facts, name)
        if measured is not None and live is not None and str(measured) != str(live):
            found.append(f"{name}: the table's is {measured}, node {facts.node} has {live}")
    return found


async def check_table(
    provenance: Mapping[str, Any], cluster: ClusterSpec, *, allow: bool
) -> list[str]:
    """Ask every node and compare. Returns what an operator should read.

    Raises:
        UsageError: a node differs and ``allow`` is false.
    """
    pool = Pool()
    try:
        answers = await asyncio.gather(*(_ask(pool, node) for node in cluster.nodes))
    finally:
        await pool.close()
    differing = [text for facts in answers if facts for text in mismatches(provenance, facts)]
    if differing and not allow:
        raise UsageError(
            "the table was measured on something else: "
            + "; ".join(dict.fromkeys(differing))
            + ". Build one for this cluster, or go on with --allow-mismatch"
        )
    pairs = zip(cluster.nodes, answers, strict=True)
    silent = [node.name for node, facts in pairs if facts is None]
    warnings = [f"MISMATCH, allowed: {text}" for text in differing]
    if silent:
        warnings.append(f"not compared with the table, no answer: {', '.join(silent)}")
    return warnings


async def _ask(pool: Pool, node: Node) -> LiveFacts | None:
    headers = tuple((k.lower().encode(), v.encode()) for k, v in node.headers().items())
    models = await _get(pool, node.url, "/v1/models", headers)
    if models is None:
        return None
    version = await _get(pool, node.url, "/version", headers)
    metrics = await _get(pool, node.metrics_url, "", headers)
    block = _BLOCK_SIZE.search(metrics.body) if metrics else None
    return LiveFacts(
        node.name, _models_in(models), _version_in(version), int(block[1]) if block else None
    )


async def _get(pool: Pool, url: str, target: str, headers: Headers) -> Response | None:
    try:
        request = Request("GET", target, headers)
        answer = await pool.fetch(Origin.parse(url), request, timeout_s=ASK_TIMEOUT_S)
    except HttpError:
        return None
    return answer if answer.ok else None


def _models_in(answer: Response) -> frozenset[str]:
    document = _document(answer)
    names: set[str] = set()
    entries = document.get("data")
    for entry in entries if isinstance(entries, list) else []:
        for name in (entry.get("id"), entry.get("root")) if isinstance(entry, dict) else ():
            if isinstance(name, str):
                names |= {name, name.rstrip("/").rpartition("/")[2]}
    return frozenset(names)


def _version_in(answer: Response | None) -> str | None:
    version = None if answer is None else _document(answer).get("version")
    return version if isinstance(version, str) and not version.endswith(NOT_AN_ENGINE) else None


def _document(answer: Response) -> dict[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
