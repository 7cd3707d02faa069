"""A client leaves, at every point of a hand-off: P holds nothing for it beyond the lease."""

from __future__ import annotations

import http.client
import json
import time
from urllib.parse import urlsplit

import pytest

from ppdbench.cluster import control, nixl
from ppdbench.cluster.canary import Path, Prober
from ppdbench.cluster.counters import read_node
from ppdbench.core.decision import Route

LEASE_S = 12
"""As the fixture starts its nodes."""


def request(prober, *, stream):
    return {
        "model": "tiny-llama", "prompt": list(prober.tokens(1500)), "max_tokens": 200,
        "temperature": 0, "ignore_eos": True, "stream": stream,
    }  # fmt: skip


def leave(node, body, *, after_lines):
    """Send ``body``, read that many lines of the answer, close the connection."""
    parts = urlsplit(node.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})  # fmt: skip
    if after_lines is None:
        time.sleep(0.02)
    else:
        response = connection.getresponse()
        for _ in range(after_lines):
            response.readline()
    connection.close()


def prefilled(node, body):
    answer = control.post(node, "/v1/completions", nixl.prefill_body(body), 60.0)
    return nixl.read_prefilled(answer)


def leave_while_p_computes(p, d, body):
    leave(p, nixl.prefill_body(body), after_lines=None)


def leave_between_p_and_d(p, d, body):
    prefilled(p, body)


def leave_while_d_reads(p, d, body):
    leave(d, nixl.decode_body(body, prefilled(p, body)), after_lines=None)


def leave_at_the_first_token(p, d, body):
    leave(d, nixl.decode_body(body, prefilled(p, body)), after_lines=1)


def leave_in_the_stream(p, d, body):
    leave(d, nixl.decode_body(body, prefilled(p, body)), after_lines=20)


@pytest.mark.parametrize(
    "scene",
    [
        leave_while_p_computes,
        leave_between_p_and_d,
        leave_while_d_reads,
        leave_at_the_first_token,
        leave_in_the_stream,
    ],
)
def test_ps_kv_use_returns_to_its_base_within_the_lease(one_p_one_d, scene):
    """However the client leaves, P's blocks are free again, and the next turn is served."""
    p, d = one_p_one_d.spec["p0"], one_p_one_d.spec["d0"]
    prober = Prober("tiny-llama", seed=time.monotonic_ns() % 2**32)
    base = settled_kv_use(p)

    scene(p, d, request(prober, stream=True))

    assert eventually_free(p, base, LEASE_S + 10)
    answer = prober.ask(Path(Route.REMOTE, d, p), prober.tokens(200), 4)
    assert len(answer.output_ids) == 4


def test_a_release_frees_p_at_once_and_moves_nothing(one_p_one_d):
    """Whoever will not ask D after all says so; no lease is waited for."""
    p, d = one_p_one_d.spec["p0"], one_p_one_d.spec["d0"]
    prober = Prober("tiny-llama", seed=time.monotonic_ns() % 2**32)
    base, before = settled_kv_use(p), read_node(d).counters
    handed = prefilled(p, request(prober, stream=False))
    assert read_node(p).gauges.kv_use > base

    with pytest.raises(control.NodeError) as refused:
        control.post(d, "/v1/completions", nixl.release_body(handed), 60.0)

    assert refused.value.status == 404
    assert eventually_free(p, base, LEASE_S / 2)
    assert read_node(d).counters.since(before).received_bytes == 0


def settled_kv_use(node):
    """What is pinned for good; hand-offs of earlier tests are waited out."""
    eventually_free(node, 0.0, LEASE_S + 10)
    return read_node(node).gauges.kv_use


def eventually_free(node, base, limit_s):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if read_node(node).gauges.kv_use <= base + 1e-9:
            return True
        time.sleep(0.25)
    return False
