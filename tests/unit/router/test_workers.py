"""``ppd serve`` as a process: two workers on one port, restarts, signals, wrong use."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import psutil
import pytest

from ppdbench.cluster.contract import ClusterSpec, cluster_from_options, write_cluster
from ppdbench.core.errors import UsageError
from ppdbench.http.client import Pool
from ppdbench.http.errors import HttpError
from ppdbench.http.messages import Origin, Request
from ppdbench.router.config import Timeouts
from ppdbench.testing.fake import FakeEngine, Fault, FaultKind, Service, every

from .publisher import CLEARED, Publisher, stored
from .tables import a_table

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def serving(*options: str, port: int):
    """The command until the block ends; yields the process."""
    command = [sys.executable, "-m", "ppdbench", "serve", *options, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        await answers(port)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), 20)


async def answers(port: int) -> None:
    async with asyncio.timeout(40):
        while True:
            try:
                if (await once(port, Request("GET", "/health"))).ok:
                    return
            except HttpError:
                await asyncio.sleep(0.05)


def listening(port: int) -> int:
    """Sockets that wait at ``port``: one per worker that has started."""
    sockets = psutil.net_connections("tcp")
    return sum(it.status == psutil.CONN_LISTEN and it.laddr.port == port for it in sockets)


async def all_listen(port: int, workers: int) -> None:
    """The first worker answers while the others still start."""
    async with asyncio.timeout(40):
        while True:
            if listening(port) >= workers:
                return
            await asyncio.sleep(0.05)


async def shown_of(port: int, turns: int) -> tuple[set[int], bytes]:
    """Which workers decided ``turns`` turns, and the metrics; receipts are shown with a delay."""
    async with asyncio.timeout(20):
        while True:
            answer = await once(port, Request("GET", "/ppd/decisions?limit=1000"))
            decisions = answer.json()["decisions"]
            if len(decisions) >= turns:
                metrics = await once(port, Request("GET", "/metrics"))
                return {decision["worker"] for decision in decisions}, metrics.body
            await asyncio.sleep(0.1)


async def once(port: int, request: Request):
    """On a connection of its own, so that any worker may get it."""
    pool = Pool()
    try:
        return await pool.fetch(Origin("http", "127.0.0.1", port), request, timeout_s=20)
    finally:
        await pool.close()


async def chat(port: int, messages):
    body = {"model": "fake", "messages": messages, "max_tokens": 4}
    answer = await once(port, Request.json("/v1/chat/completions", body))
    assert answer.ok, answer.body
    reply = answer.json()["choices"][0]["message"]
    seen = {n: answer.head.get(f"x-ppd-{n}".encode()).decode() for n in ("route", "node", "reason")}
    return [*messages, reply], seen


async def digests(port: int) -> set[str]:
    """Of the tables in use, as the workers tell it: enough questions to hear them all."""
    states = [await once(port, Request("GET", "/ppd/state")) for _ in range(16)]
    return {state.json()["table_digest"] for state in states}


async def all_use(port: int, digest: str) -> None:
    async with asyncio.timeout(20):
        while await digests(port) != {digest}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def said(process, words: str, times: int = 1) -> str:
    """Read what the command writes up to the line that has ``words`` for the last of ``times``."""
    async with asyncio.timeout(40):
        while True:
            line = (await process.stderr.readline()).decode()
            assert line, f"it ended without saying {words!r}"
            times -= words in line
            if not times:
                return line


def asks(at: int, turn: int):
    return {"role": "user", "content": f"conversation {at} asks question {turn}, please answer"}


async def test_two_workers_keep_later_turns_at_home_and_a_restart_is_cold():
    """At least 99 % of later turns stay home; after a restart the router says cold."""
    async with FakeEngine() as p, FakeEngine() as d0, FakeEngine() as d1:
        nodes = [f"--node={role}={e.url}" for role, e in (("P", p), ("D", d0), ("D", d1))]
        port = free_port()
        async with serving("--policy", "local", *nodes, "--workers", "2", port=port):
            await all_listen(port, 2)
            talks = [await chat(port, [asks(at, 1)]) for at in range(40)]
            stayed = 0
            for turn in (2, 3, 4):
                for at, (history, before) in enumerate(talks):
                    talks[at] = await chat(port, [*history, asks(at, turn)])
                    stayed += talks[at][1] == before | {"route": "local", "reason": "policy"}
            workers, metrics = await shown_of(port, 160)
        async with serving("--policy", "local", *nodes, "--workers", "2", port=port):
            _, after = await chat(port, [*talks[0][0], asks(0, 5)])

    assert stayed >= 0.99 * 120
    assert workers == {0, 1}
    assert b'ppd_outcomes_total{outcome="ok"} 160.0' in metrics
    assert (after["route"], after["reason"]) == ("remote", "cold")


async def test_the_command_says_where_it_serves_once_every_worker_listens():
    """Whoever waits for that line connects next, and must not be refused."""
    port = free_port()
    options = ["--policy", "roles", "--node=R=http://127.0.0.1:1", "--workers", "2"]
    command = [sys.executable, "-m", "ppdbench", "serve", *options, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        line = await said(process, "serving")
        listen = listening(port)
        process.terminate()
        _, rest = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()

    assert line.endswith(f"on http://127.0.0.1:{port}\n")
    assert listen == 2
    assert b"serving" not in rest


async def test_what_one_worker_reads_of_kv_events_both_know(tmp_path):
    """The one that listens may die too: its successor sees by the numbers that it missed some."""
    with Publisher() as publisher:
        async with FakeEngine() as p, FakeEngine() as d:
            spec = cluster_from_options([f"P={p.url}", f"D={d.url}"])
            nodes = (spec["p0"], replace(spec["d0"], kv_events=publisher.endpoint))
            write_cluster(ClusterSpec(nodes), tmp_path / "c.toml")
            port = free_port()
            options = ("--policy", "local", "--cluster", str(tmp_path / "c.toml"), "--workers", "2")
            async with serving(*options, port=port) as process:
                await all_listen(port, 2)
                await publisher.subscribed()
                cleared = await reasons_after(port, publisher.send(CLEARED), batches=1)
                os.kill(children_of(process.pid)[0], signal.SIGKILL)
                await publisher.subscribed()
                publisher.number += 1
                missed = await reasons_after(port, publisher.send(stored(b"a")), batches=2)

    assert cleared == missed == {"cold"}


async def reasons_after(port: int, event, batches: int) -> set[str]:
    """Of the second turns of eight conversations, on whichever worker, ``event`` between them."""
    talks = [(await chat(port, [asks(at, 1)]))[0] for at in range(8)]
    await event
    read = b"ppd_kv_events_total %.1f" % batches
    async with asyncio.timeout(20):
        while read not in (await once(port, Request("GET", "/metrics"))).body:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return {(await chat(port, [*talk, asks(9, 2)]))[1]["reason"] for talk in talks}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_worker_that_dies_is_replaced():
    """Its port share is served again and its gauges are given back."""
    async with FakeEngine() as r0:
        port = free_port()
        options = ("--policy", "roles", f"--node=R={r0.url}", "--workers", "2")
        async with serving(*options, port=port) as process:
            victim = children_of(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(20):
                while victim in (now := children_of(process.pid)) or len(now) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await answers(port)
            for at in range(10):
                await chat(port, [asks(at, 1)])


async def test_a_worker_is_replaced_though_the_decisions_log_is_lost(tmp_path):
    """Its folder removed by somebody is no reason to end the router; turns go on without a log."""
    folder = tmp_path / "logs"
    folder.mkdir()
    async with FakeEngine() as r0:
        port = free_port()
        options = ("--policy", "roles", f"--node=R={r0.url}", "--workers", "2")
        log = f"--decisions-log={folder / 'log'}"
        async with serving(*options, log, port=port) as process:
            await all_listen(port, 2)
            shutil.rmtree(folder)
            for pid in children_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            await said(process, "turns go on without it", 2)
            await answers(port)
            _, seen = await chat(port, [asks(0, 1)])

    assert seen["route"] == "replica"


async def test_a_worker_that_cannot_begin_says_why_and_is_not_begun_without_a_pause():
    """What one lacks the next lacks too: without a pause there were a hundred a second."""
    never = (
        "from ppdbench.cli.app import app; from ppdbench.core.errors import UsageError\n"
        "from ppdbench.router import run\n"
        "def work(*_): raise UsageError('its ca_file is lost')\n"
        "run._work = work\n"
        "app()"
    )
    options = ["--policy", "roles", "--node=R=http://127.0.0.1:1", "--workers", "2"]
    command = [sys.executable, "-c", never, "serve", *options, "--port", str(free_port())]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        await said(process, "its ca_file is lost", 2)
        begun_s = time.monotonic()
        await said(process, "its ca_file is lost", 3)
        took_s = time.monotonic() - begun_s
        process.terminate()
        async with asyncio.timeout(10):
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert took_s > 2.0
    assert process.returncode == 0


async def test_a_worker_that_does_not_end_keeps_no_router_alive():
    """One that is stopped, as by a debugger, is killed some seconds after the drain's end."""
    port = free_port()
    options = ("--policy", "roles", "--node=R=http://127.0.0.1:1", "--workers", "2")
    async with serving(*options, "--drain-s", "0", port=port) as process:
        await all_listen(port, 2)
        workers = children_of(process.pid)
        process.send_signal(signal.SIGALRM)  # a stray one means nothing yet
        await answers(port)
        assert children_of(process.pid) == workers
        stopped = workers[0]
        os.kill(stopped, signal.SIGSTOP)
        process.terminate()
        async with asyncio.timeout(15):
            _, error = await process.communicate()

    assert process.returncode == 0
    assert b"killed for not ending in time: worker" in error
    assert not psutil.pid_exists(stopped)


async def test_workers_end_with_a_parent_that_is_killed():
    """Else they would hold the port, ruled by nobody; turns under way are finished."""
    slow = Service(first_token_s=1.5)
    async with FakeEngine(service=slow) as r0:
        port = free_port()
        options = ("--policy", "roles", f"--node=R={r0.url}", "--workers", "2")
        async with serving(*options, port=port) as process:
            await all_listen(port, 2)
            workers = [psutil.Process(pid) for pid in children_of(process.pid)]
            asking = asyncio.create_task(chat(port, [asks(0, 1)]))
            async with asyncio.timeout(20):
                while not r0.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            process.kill()
            _, seen = await asking
            gone, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=20)

    assert seen["route"] == "replica"
    assert (len(gone), alive) == (2, [])


async def test_sigterm_drains_and_exits_0():
    """What runs is finished; the exit code says that all went well."""
    async with FakeEngine() as r0:
        port = free_port()
        async with serving("--policy", "roles", f"--node=R={r0.url}", port=port) as process:
            await chat(port, [asks(0, 1)])
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)

    assert process.returncode == 0


@pytest.mark.parametrize("at", ["_check_port", "_fork"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_to_stop_before_its_workers_are_there_it_stops(at, number):
    """Else they would be begun after all, told by nobody, and the port never given back."""
    told_in_between = (
        "import os, sys; from ppdbench.router import run; from ppdbench.cli.app import app\n"
        f"before = run._Crew.{at}\n"
        f"run._Crew.{at} = lambda *given: (before(*given), os.kill(os.getpid(), {number:d}))\n"
        "app()"
    )
    options = ["--policy", "roles", "--node=R=http://127.0.0.1:1", "--workers", "2"]
    command = [sys.executable, "-c", told_in_between, "serve", *options, "--port", str(free_port())]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(20):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 0


async def test_many_connections_need_no_help_from_the_shell():
    """A turn takes two; out of files, living nodes would seem dead and all turns fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        port = free_port()
        async with serving("--policy", "roles", "--node=R=http://127.0.0.1:1", port=port) as it:
            allowed = psutil.Process(it.pid).rlimit(psutil.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert allowed == (hard, hard)


async def later_route(port: int, at: int) -> tuple[str, str]:
    """Route and reason of the second turn of a new conversation."""
    history, _ = await chat(port, [asks(at, 1)])
    _, seen = await chat(port, [*history, asks(at, 2)])
    return seen["route"], seen["reason"].partition(",")[0]


@pytest.mark.parametrize("workers", [1, 2])
async def test_sighup_takes_a_good_table_and_keeps_the_one_in_use_for_a_bad_one(tmp_path, workers):
    """Each worker hears it; turns follow the table in use; the log says what was wrong.

    The first signal comes without a change, so that nothing but the signal can have been heard.
    """
    path = tmp_path / "t.json"
    old = a_table(path, local=True).digest
    async with FakeEngine() as p, FakeEngine() as d:
        port = free_port()
        nodes = (f"--node=P={p.url}", f"--node=D={d.url}", "--workers", str(workers))
        async with serving("--table", str(path), *nodes, port=port) as process:
            await all_listen(port, workers)
            before = await digests(port), await later_route(port, 1)
            process.send_signal(signal.SIGHUP)
            await said(process, "took the table anew", workers)
            assert await digests(port) == {old}
            new = a_table(path, local=False).digest
            process.send_signal(signal.SIGHUP)
            await all_use(port, new)
            after = await digests(port), await later_route(port, 2)
            path.write_text("{")
            process.send_signal(signal.SIGHUP)
            sentence = await said(process, "kept the table in use", workers)
            still = await digests(port), await later_route(port, 3)

    assert before == ({old}, ("local", "table"))
    assert after == still == ({new}, ("remote", "table"))
    assert f"{path}" in sentence
    assert "JSON" in sentence


async def test_a_worker_that_replaces_a_dead_one_decides_by_the_table_in_use(tmp_path):
    """Not by the one that the command began with; a bad file since then does not end it."""
    path = tmp_path / "t.json"
    a_table(path, local=True)
    async with FakeEngine() as p, FakeEngine() as d:
        port = free_port()
        nodes = (f"--node=P={p.url}", f"--node=D={d.url}", "--workers", "2")
        async with serving("--table", str(path), *nodes, port=port) as process:
            await all_listen(port, 2)
            new = a_table(path, local=False).digest
            await all_use(port, new)
            for victim in children_of(process.pid):
                os.kill(victim, signal.SIGKILL)
            await said(process, "took the table anew", 4)
            await all_listen(port, 2)
            seen = await digests(port), await later_route(port, 1)

    assert seen == ({new}, ("remote", "table"))


def write_tokenizer(path) -> None:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


@pytest.mark.parametrize("place", ["tokenizer.json", "."])
async def test_a_tokenizer_counts_the_new_tokens_in_every_worker(tmp_path, place):
    """File or folder: twelve words are twelve tokens, and a threshold of 12 sees no more."""
    write_tokenizer(tmp_path / "tokenizer.json")
    new = {"role": "user", "content": "incomprehensibilities " * 12}
    async with FakeEngine() as p, FakeEngine() as d:
        port = free_port()
        nodes = (f"--node=P={p.url}", f"--node=D={d.url}", "--workers", "2")
        options = ("--policy", "threshold:12", "--tokenizer", str(tmp_path / place), *nodes)
        async with serving(*options, port=port):
            await all_listen(port, 2)
            for at in range(20):
                history, _ = await chat(port, [asks(at, 1)])
                await chat(port, [*history, new])
            workers, _ = await shown_of(port, 40)
            answer = await once(port, Request("GET", "/ppd/decisions?limit=1000"))
    later = [it for it in answer.json()["decisions"] if it["turn"] == 2]

    assert {it["worker"] for it in later} == workers == {0, 1}
    assert {(it["new_tokens"], it["route"]) for it in later} == {(12, "local")}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--node", "R=http://127.0.0.1:1"], 2, "either --table T.json or --policy NAME"),
        (["--policy", "roles"], 2, "either --cluster cluster.toml or --node"),
        (["--policy", "sideways", "--node", "R=http://127.0.0.1:1"], 2, "unknown policy"),
        (["--policy", "roles", "--node", "X=http://127.0.0.1:1"], 2, "role 'X' is unknown"),
        (["--policy", "roles", "--node", "D=http://127.0.0.1:1"], 2, "P is present exactly"),
        (
            ["--policy", "roles", "--node", "R=http://127.0.0.1:1", "--tokenizer", "none"],
            2,
            "expected a model folder that holds tokenizer.json",
        ),
        (["--table", "none.json", "--node", "R=http://127.0.0.1:1"], 2, "none.json"),
    ],
)
async def test_wrong_use_is_one_sentence(options, code, words):
    """No traceback; the sentence says what to do."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ppdbench", "serve", *options, stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == code
    assert words in error.decode()
    assert b"Traceback" not in error


@pytest.mark.parametrize("option", ["prefill", "first-byte"])
async def test_the_limit_of_a_phase_is_an_option(option):
    """A node that takes a turn and never answers: 504 after as long as was said."""
    port, hang = free_port(), every(1, Fault(FaultKind.HANG))
    async with FakeEngine(faults=hang) as p, FakeEngine(faults=hang) as d:
        nodes = (f"--node=P={p.url}", f"--node=D={d.url}")
        if option == "first-byte":
            nodes = (f"--node=R={d.url}",)
        async with serving("--policy", "local", *nodes, f"--{option}-timeout-s", "0.3", port=port):
            body = {"model": "fake", "messages": [asks(0, 1)], "max_tokens": 2}
            answer = await once(port, Request.json("/v1/chat/completions", body))

    assert answer.head.status == 504


@pytest.mark.parametrize("limit_s", [0, -1, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(limit_s):
    """The option and its value are named."""
    with pytest.raises(UsageError, match=rf"--silence-timeout-s is {limit_s:g}; it must be"):
        Timeouts(silence_s=limit_s)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("shared", [False, True])
async def test_a_port_in_use_is_exit_code_3(workers, shared):
    """The sentence names the port; also where its user would share it, as another router does."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ["--policy", "roles", "--node", "R=http://127.0.0.1:1", "--workers", workers]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ppdbench", "serve", *options, "--port", str(port),
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, error = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == 3
    assert str(port) in error.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_state_file_serves_one_router(tmp_path, workers):
    """Two would mix up each other's counts and notes."""
    options = [
        "--policy", "roles", "--node", "R=http://127.0.0.1:1", "--workers", workers,
        "--state-file", str(tmp_path / "state"),
    ]  # fmt: skip
    async with serving(*options, port=free_port()):
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ppdbench", "serve", *options, "--port", str(free_port()),
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, error = await asyncio.wait_for(second.communicate(), 60)

    assert second.returncode == 2
    assert "in use by another router" in error.decode()


async def test_the_decisions_log_holds_one_line_per_turn_and_no_text(tmp_path):
    """Counts, names and times only."""
    log = tmp_path / "decisions.jsonl"
    async with FakeEngine() as r0:
        port = free_port()
        options = ("--policy", "roles", f"--node=R={r0.url}", "--decisions-log", str(log))
        async with serving(*options, port=port):
            await chat(port, [{"role": "user", "content": "my secret words"}])
    lines = log.read_bytes().splitlines()

    assert [orjson.loads(line)["outcome"] for line in lines] == ["ok"]
    assert b"secret" not in lines[0]
