"""ScriptedCluster: a topology of FakeEngines, so that a whole point can be run anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.core.topology import NodeSpec, Topology
from ppdbench.testing.fake import FakeEngine

EngineMaker = Callable[[NodeSpec], FakeEngine]


class ScriptedCluster:
    """One engine per node of ``topology``, made by ``engine_for``; use as a context manager.

    ``spec`` is the cluster's contract; ``engines`` are the nodes by name.
    """

    def __init__(
        self, topology: Topology | str, engine_for: EngineMaker = lambda _: FakeEngine()
    ) -> None:
        shape = topology if isinstance(topology, Topology) else Topology.parse(topology)
        self._nodes = shape.nodes
        self.engines = {node.name: engine_for(node) for node in shape.nodes}

    def __repr__(self) -> str:
        return f"<ScriptedCluster {list(self.engines.values())}>"

    @property
    def spec(self) -> ClusterSpec:
        return ClusterSpec(
            tuple(Node(n.name, n.role, self.engines[n.name].url) for n in self._nodes)
        )

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(engine.start() for engine in self.engines.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))
