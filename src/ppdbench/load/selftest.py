"""Can this client measure? Its own driver against an instant engine in another process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import Role
from ppdbench.http.messages import Origin, Request
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.fixed import RolesPolicy
from ppdbench.runs.points import PointOutcome
from ppdbench.runs.records import TurnRecord

PROMPT_TOKENS = 8
CHUNKS_PER_STREAM = 64
USERS = 32
ROUNDS = 3
BARE_TRIES = 50
BARE_BUSY_SHARE = 0.8
"""The bare client waits for an answer at most this share of its time, at the median."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure of the self-test and what it should be."""

    name: str
    value: float
    wanted: str
    met: bool


@dataclass(frozen=True, slots=True)
class Capability:
    """What one client process does on one core.

    ``added_ttft_*`` is our TTFT less a bare blocking socket's at the same rate in the same run, or
    at the most it can keep, both counted from the schedule. ``cpu_s_*`` is processor time of this
    process alone, which other load on the machine does not stretch.
    """

    requests_per_s: float
    chunks_per_s: float
    cpu_s_per_request: float
    cpu_s_per_chunk: float
    half_rate_per_s: float
    bare_ttft_p50_s: float
    bare_ttft_p99_s: float
    added_ttft_p50_s: float
    added_ttft_p99_s: float
    send_lag_p50_s: float
    send_lag_p99_s: float
    loop_lag_p99_s: float

    def targets(self) -> list[Target]:
        """What a client that can be trusted does on a quiet machine."""
        least = {"requests_per_s": 6_000, "chunks_per_s": 100_000}
        most = {"added_ttft_p50_s": 0.0003, "added_ttft_p99_s": 0.002, "send_lag_p99_s": 0.002}
        values = {name: float(getattr(self, name)) for name in (*least, *most)}
        return [
            *(Target(n, values[n], f"≥ {w:,}", values[n] >= w) for n, w in least.items()),
            *(Target(n, values[n], f"≤ {w:g}", values[n] <= w) for n, w in most.items()),
        ]


def measure_capability(seconds: float = 2.0) -> Capability:
    """Takes about eight times ``seconds``.

    Raises:
        EngineError: the instant engine does not start.
    """
    import uvloop

    with instant_engine() as url:
        return uvloop.run(_measure(url, seconds))


@contextmanager
def instant_engine() -> Iterator[str]:
    """The URL of an instant engine that ends with this block or with this process."""
    command = [sys.executable, "-m", "ppdbench.testing.instant"]
    with subprocess.Popen(  # noqa: S603  (our own module)
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise EngineError("the instant engine did not start; run it to see why: "
                              f"{' '.join(command)}")  # fmt: skip
        try:
            yield url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()


async def _measure(url: str, seconds: float) -> Capability:
    await _closed_loop(url, 500, 1)
    requests_per_s, cpu_s_per_request = await _saturate(url, seconds, 1)
    streams_per_s, cpu_s_per_stream = await _saturate(url, seconds, CHUNKS_PER_STREAM)
    half = requests_per_s / 2
    ours: list[float] = []
    bare: list[float] = []
    sends: list[float] = []
    loops: list[float] = []
    for _ in range(ROUNDS):
        outcome = await _open_loop(url, half, seconds / ROUNDS)
        ours += [r.ttft_s for r in outcome.records if r.ttft_s is not None]
        sends += [r.sent_at_s - r.scheduled_at_s for r in outcome.records]
        loops.append(outcome.facts["loop_lag_p99_s"])
        bare += await asyncio.to_thread(_bare_ttfts, url, half, seconds / ROUNDS)
    ours_p50, ours_p99 = np.percentile(ours, (50, 99))
    bare_p50, bare_p99 = np.percentile(bare, (50, 99))
    send_p50, send_p99 = np.percentile(sends, (50, 99))
    return Capability(
        requests_per_s=requests_per_s,
        chunks_per_s=streams_per_s * CHUNKS_PER_STREAM,
        cpu_s_per_request=cpu_s_per_request,
        cpu_s_per_chunk=cpu_s_per_stream / CHUNKS_PER_STREAM,
        half_rate_per_s=half,
        bare_ttft_p50_s=float(bare_p50),
        bare_ttft_p99_s=float(bare_p99),
        added_ttft_p50_s=float(ours_p50 - bare_p50),
        added_ttft_p99_s=float(ours_p99 - bare_p99),
        send_lag_p50_s=float(send_p50),
        send_lag_p99_s=float(send_p99),
        loop_lag_p99_s=float(np.median(loops)),
    )


async def converse(url: str, turns: tuple[Turn, ...]) -> list[TurnRecord]:
    """One conversation through the whole driver."""
    return (await _point(url, [Arrival(0.0, Conversation("check", turns))])).records


async def _saturate(url: str, seconds: float, tokens: int) -> tuple[float, float]:
    """Requests per second of wall time, and processor seconds per request."""
    sample = 400
    rate = sample / (await _closed_loop(url, sample, tokens))[0]
    count = max(sample, int(rate * seconds))
    wall_s, cpu_s = await _closed_loop(url, count, tokens)
    return count / wall_s, cpu_s / count


async def _closed_loop(url: str, count: int, tokens: int) -> tuple[float, float]:
    talks = _talks(count, tokens, 0.0)
    cpu_s = time.process_time()
    outcome = await _point(url, talks, users=USERS)
    return outcome.timing["wall_s"], time.process_time() - cpu_s


async def _open_loop(url: str, rate_per_s: float, seconds: float) -> PointOutcome:
    return await _point(url, _talks(max(1, int(rate_per_s * seconds)), 1, 1 / rate_per_s))


async def _point(url: str, arrivals: list[Arrival], users: int | None = None) -> PointOutcome:
    settings = LiveSettings(TurnSettings("instant"), users=users, processes=1)
    outcome = await run_live_point(_cluster(url), RolesPolicy(), arrivals, 1.0, settings, 0)
    failed = [record.error for record in outcome.records if not record.ok]
    if failed:
        raise EngineError(f"{len(failed)} requests to the instant engine failed: {failed[0]}")
    return outcome


def _cluster(url: str) -> ClusterSpec:
    return ClusterSpec((Node("r0", Role.R, url),))


def _talks(count: int, tokens: int, gap_s: float) -> list[Arrival]:
    turns = (Turn(PROMPT_TOKENS, tokens, token_ids=tuple(range(300, 300 + PROMPT_TOKENS))),)
    return [Arrival(i * gap_s, Conversation(str(i), turns)) for i in range(count)]


def _bare_ttfts(url: str, rate_per_s: float, seconds: float) -> list[float]:
    """A blocking socket, one request at a time at a steady pace: the floor on this machine.

    Counted from the schedule as ours is: counted from the send, a client that waits for each answer
    would see a pause of the machine once, where an open loop has it in every turn that piled up.
    Where the wanted pace is more than it can keep, it goes slower: its TTFT would be its own queue.
    """
    origin = Origin.parse(url)
    body = {"model": "instant", "prompt": list(range(300, 308)), "max_tokens": 1, "stream": True}
    wire = Request.json("/v1/completions", body).render(origin)
    with socket.create_connection((origin.host, origin.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        alone_s = np.median([_bare_ttft(connection, wire, 0.0)[1] for _ in range(BARE_TRIES)])
        gap_s = max(1 / rate_per_s, float(alone_s) / BARE_BUSY_SHARE)
        begin_s = time.monotonic()
        return [
            _bare_ttft(connection, wire, begin_s + i * gap_s)[0]
            for i in range(max(1, int(seconds / gap_s)))
        ]


def _bare_ttft(connection: socket.socket, wire: bytes, due_s: float) -> tuple[float, float]:
    """Seconds from ``due_s`` to the first bytes of an answer, and from the send to its end."""
    while time.monotonic() < due_s:
        time.sleep(0)
    sent_s = time.monotonic()
    connection.sendall(wire)
    data = connection.recv(65536)
    first_s = time.monotonic()
    while not data.endswith(b"0\r\n\r\n"):
        data += connection.recv(65536)
    return first_s - due_s, time.monotonic() - sent_s
