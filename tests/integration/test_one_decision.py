"""One policy, one decision: in the simulator, in a live point and over HTTP through the router."""

from __future__ import annotations

from itertools import product

import pytest
import uvloop

from ppdbench.core.conversation import Arrival, Conversation, Turn
from ppdbench.core.topology import Topology
from ppdbench.http.client import Pool
from ppdbench.http.messages import Origin, Request
from ppdbench.load.live import LiveSettings, run_live_point
from ppdbench.load.simulated import run_simulated_point
from ppdbench.load.turns import TurnSettings
from ppdbench.policy.parse import parse_policy
from ppdbench.policy.table import load_table_policy
from ppdbench.router.config import RouterConfig
from ppdbench.router.policies import load_policy
from ppdbench.router.shared import Shared, make_buffer
from ppdbench.router.worker import Router
from ppdbench.sim.config import SimConfig
from ppdbench.table.schema import AXES, Cell, Table, save_table
from ppdbench.table.score import STATISTICS, Rule, Side
from ppdbench.testing import ScriptedCluster

TOPOLOGY = "1P_2D"
RATE_PER_S = 2.0
SHAPES = [
    [(400, 16), (24, 16), (900, 16), (40, 64)],
    [(60, 64), (300, 16), (30, 16), (700, 64)],
    [(1500, 16), (20, 64), (20, 16), (500, 16)],
    [(100, 16), (150, 64), (260, 16), (90, 64), (33, 16)],
]
"""New and output tokens of each turn; the lengths fall on both sides of every border used here."""


def arrivals():
    return [
        Arrival(0.01 * at, Conversation(f"c{at}", tuple(Turn(new, out) for new, out in shape)))
        for at, shape in enumerate(SHAPES)
    ]


def write_table(path):
    """Cells of one rate, each two neighbours in new tokens of opposite opinion."""
    tpot = dict.fromkeys(STATISTICS, 0.01)
    fast, slow = (
        Side(50, 1.0, dict.fromkeys(STATISTICS, ttft_s), tpot, tpot) for ttft_s in (0.05, 0.2)
    )
    places = product(enumerate((256, 1024)), enumerate((32, 128, 512)), (16, 64))
    cells = []
    for (i, context), (j, new), output in places:
        sides = (slow, fast) if (i + j) % 2 else (fast, slow)
        cells.append(
            Cell(
                topology=TOPOLOGY,
                workload=f"{context}-{new}-{output}",
                backend="sim",
                centre=dict(zip(AXES, (context, new, output, RATE_PER_S), strict=True)),
                remote=sides[0],
                local=sides[1],
            )
        )
    save_table(Table(Rule(), {}, tuple(cells)), path)
    return f"table:{path}"


class Witness:
    """The policy, and what it answered under each key: a record holds no cell."""

    def __init__(self, name):
        self._policy = parse_policy(name, load_table_policy)
        self.name = name
        self.cells = {}

    def decide(self, features, home):
        decision = self._policy.decide(features, home)
        self.cells[features.key] = decision.cell
        return decision


def told(outcome, witness):
    """Route and cell of each turn of a point."""
    assert all(record.ok for record in outcome.records)
    keys = {f"{r.conversation}/{r.turn}": r.route.value for r in outcome.records}
    return {key: (route, witness.cells.get(key)) for key, route in keys.items()}


def in_the_simulator(name):
    witness = Witness(name)
    topology = Topology.parse(TOPOLOGY)
    point = (topology, witness, arrivals(), RATE_PER_S, SimConfig(), 1)
    return told(run_simulated_point(*point), witness)


async def in_a_live_point(name):
    witness = Witness(name)
    live = LiveSettings(TurnSettings("fake"), processes=1)
    async with ScriptedCluster(TOPOLOGY) as cluster:
        point = (cluster.spec, witness, arrivals(), RATE_PER_S, live, 1)
        return told(await run_live_point(*point), witness)


async def over_http(name, *, named):
    """All conversations side by side, turn by turn, by a client that sends token ids."""
    async with ScriptedCluster(TOPOLOGY) as cluster:
        config = RouterConfig(cluster=cluster.spec, policy=name, port=0, max_notes=1024)
        shared = Shared.over(make_buffer(config), config, 0)
        async with Router(config, load_policy(config), shared) as router:
            client = Client(router.url, named=named)
            for turn in range(max(map(len, SHAPES))):
                for at, shape in enumerate(SHAPES):
                    if turn < len(shape):
                        await client.say(f"c{at}", *shape[turn])
            await client.pool.close()
    return client.seen


class Client:
    """Keeps each conversation's ids; ``seen`` is what the router's headers told."""

    def __init__(self, url, *, named):
        self.pool = Pool()
        self.seen = {}
        self._origin = Origin.parse(url)
        self._named = named
        self._ids = {}
        self._turns = {}

    async def say(self, conversation, new, out):
        ids = self._ids.setdefault(conversation, [])
        turn = self._turns[conversation] = self._turns.get(conversation, 0) + 1
        ids += [16 + (int(conversation[1:]) * 977 + len(ids) + i * 31) % 4000 for i in range(new)]
        body = {"prompt": ids, "max_tokens": out, "ignore_eos": True, "return_token_ids": True}
        headers = ((b"x-session-id", conversation.encode()),) if self._named else ()
        request = Request.json("/v1/completions", {"model": "fake", **body}, headers)
        answer = await self.pool.fetch(self._origin, request, timeout_s=20)
        assert answer.ok, answer.body
        cell = answer.head.get(b"x-ppd-cell")
        route = answer.head.get(b"x-ppd-route").decode()
        self.seen[f"{conversation}/{turn}"] = route, None if cell is None else int(cell)
        ids += answer.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("policy", ["threshold:128", "share:0.5", "table"])
def test_the_same_conversations_get_the_same_routes_everywhere(policy, tmp_path):
    """Equal routes turn by turn and, from a table, equal cells.

    Token-id prompts, because of a text the router can only estimate the new tokens. The client
    names its conversations, because ``share:F`` draws by name. The table knows one rate, because
    the router counts arrivals over a window while a point is told its rate.
    """
    name = write_table(tmp_path / "t.json") if policy == "table" else policy

    simulated = in_the_simulator(name)
    live = uvloop.run(in_a_live_point(name))
    served = uvloop.run(over_http(name, named=True))

    assert live == simulated
    assert served == simulated
    later = [key for key in simulated if not key.endswith("/1")]
    assert {simulated[key][0] for key in later} == {"local", "remote"}
    cells = {simulated[key][1] for key in later}
    assert len(cells) > 4 if policy == "table" else cells == {None}


@pytest.mark.parametrize("policy", ["threshold:128", "table"])
def test_an_unnamed_conversation_gets_the_routes_of_the_sweep(policy, tmp_path):
    """Who is speaking is found in the ids themselves, and the features are the same."""
    name = write_table(tmp_path / "t.json") if policy == "table" else policy

    assert uvloop.run(over_http(name, named=False)) == in_the_simulator(name)
