"""The layout shows the architecture, and this keeps it true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "ppdbench"

MAY_IMPORT = {
    "core": set(),
    "runs": {"core"},
    "table": {"core", "runs"},
    "policy": {"core", "table"},
    "workload": {"core"},
    "http": {"core"},
    "cluster": {"core", "http"},
    "sim": {"core", "workload", "http", "cluster", "policy", "table", "runs", "testing"},
    "testing": {"core", "runs", "http", "cluster"},
    "load": {"core", "runs", "workload", "http", "cluster", "sim", "policy", "table"},
    "experiments": {
        "core", "runs", "workload", "http", "cluster", "sim", "policy", "table", "load",
    },
    "router": {"core", "runs", "http", "cluster", "policy", "table"},
    "plots": {"core", "runs", "table"},
}  # fmt: skip

HOMES = {
    "typer": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"plots"},
    "aiohttp": {"cluster", "router", "testing", "sim", "load"},
    "datasets": {"workload"},
    "ijson": {"workload"},
    "msgspec": {"router", "http"},
    "zmq": {"router"},
    "vllm": set(),
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_a_layer_imports_only_what_stands_below_it(layer):
    """Core ← runs ← table ← policy; core ← workload; core ← http ← cluster ← sim; … ← cli."""
    allowed = MAY_IMPORT[layer] | {layer}
    wrong = [
        f"{path.relative_to(SRC)}: {name}"
        for path in (SRC / layer).rglob("*.py")
        for name in imports(path)
        if name.startswith("ppdbench.") and name.split(".")[1] not in allowed
    ]

    assert not wrong


def test_each_heavy_library_has_one_home():
    """A library is imported only in the layer that owns it; only the engine's plugin meets vLLM."""
    wrong = [
        f"{path.relative_to(SRC)}: {name}"
        for path in SRC.rglob("*.py")
        if path.parent.name != "engine_plugin"
        for name in imports(path)
        if name.split(".")[0] in HOMES
        and path.relative_to(SRC).parts[0] not in HOMES[name.split(".")[0]]
    ]

    assert not wrong


def test_every_layer_is_known():
    """A new package must say what it may import."""
    packages = {path.parent.name for path in SRC.glob("*/__init__.py")}

    assert packages - {"cli"} == set(MAY_IMPORT)
