"""Real vLLM on CPU, started once per session. Without the engine these skip, but not in CI."""

from __future__ import annotations

import os

import pytest

from ppdbench.cluster.engine import find_python
from ppdbench.cluster.launch import LaunchOptions, launch
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import Topology


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/live" in str(item.path):
            item.add_marker(pytest.mark.live)
            item.add_marker(pytest.mark.timeout(900))
    # Those that start nodes of their own come first: on two cores the shared cluster, which stays
    # to the end, would slow their start by half.
    items.sort(key=lambda item: "one_p_one_d" in item.fixturenames)


@pytest.fixture(scope="session")
def engine_python():
    try:
        return find_python(None, Device.CPU)
    except EngineError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run this test: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def one_p_one_d(engine_python, tmp_path_factory):
    """1P_1D of the tiny Llama, able to pull, with a short lease."""
    options = LaunchOptions(device=Device.CPU, pull=True, lease_s=12)
    with launch(Topology.parse("1P_1D"), options, tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster
