"""How to start the simulated nodes of a topology as processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ppdbench.cluster.vllm_args import HOST, NodeCommand
from ppdbench.core.topology import Topology
from ppdbench.sim.config import SimConfig


def write_config(config: SimConfig, path: Path) -> Path:
    """Write ``config`` where :func:`sim_commands`' nodes read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config.as_dict(), indent=1))
    return path


def sim_commands(
    topology: Topology, ports: Sequence[int], config_file: Path
) -> tuple[NodeCommand, ...]:
    """One command per node, in topology order."""
    return tuple(
        NodeCommand(
            spec,
            f"http://{HOST}:{port}",
            (
                sys.executable, "-m", "ppdbench.sim.serve_node", "--role", spec.role.value,
                "--host", HOST, "--port", str(port), "--config", str(config_file.resolve()),
            ),
            {},
        )
        for spec, port in zip(topology.nodes, ports, strict=True)
    )  # fmt: skip
