"""The exact command and environment of every node on 4× H100, in a file that is read in review.

``PPD_UPDATE_GOLDEN=1`` writes it anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from ppdbench.cluster.launch import LaunchOptions, planned_commands
from ppdbench.core.topology import NAMED_TOPOLOGIES, Topology

GOLDEN = Path(__file__).parents[2] / "golden" / "cluster-commands-4xh100.txt"


def as_text():
    options = LaunchOptions(model="meta-llama/Llama-3.1-8B", gpus=("0", "1", "2", "3"))
    lines = []
    for name in NAMED_TOPOLOGIES:
        lines.append(f"## {name}")
        for command in planned_commands(Topology.parse(name), options):
            lines += [f"# {command.spec.name} ({command.spec.role})", command.as_shell(), ""]
    return "\n".join(lines)


def test_the_commands_of_the_seventeen_topologies_are_those_on_file():
    """A change of any node's command shows in the diff of the golden file."""
    if os.environ.get("PPD_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(as_text())

    assert as_text() == GOLDEN.read_text()
