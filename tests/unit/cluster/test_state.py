from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.processes import started
from ppdbench.cluster.state import StateFolder
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Role

SPEC = ClusterSpec((Node("r0", Role.R, "http://127.0.0.1:1"),))


@pytest.fixture
def sleeper():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def recorded(folder, process):
    state = StateFolder(folder)
    state.write("vllm", SPEC, {"r0": started(process.pid)})
    return state


def test_down_ends_what_the_file_names_and_forgets_it(tmp_path, sleeper):
    """The file's process is gone, and so are the state file and the cluster file."""
    state = recorded(tmp_path, sleeper)
    assert state.read().alive(SPEC["r0"])

    assert state.down().spec == SPEC

    assert sleeper.wait(timeout=5) != 0
    assert list(tmp_path.iterdir()) == []
    assert state.down() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document | {"boot": "another"},
        lambda document: document | {"processes": {"r0": [document["processes"]["r0"][0], 1]}},
    ],
    ids=["after a reboot", "another start of the same pid"],
)
def test_a_stale_file_ends_no_stranger(tmp_path, sleeper, change):
    """The pid alone proves nothing."""
    state = recorded(tmp_path, sleeper)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert not state.read().alive(SPEC["r0"])

    state.down()

    assert sleeper.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_one_cluster_at_a_time(tmp_path, sleeper):
    """A living one is refused; a dead one's files make way."""
    state = recorded(tmp_path, sleeper)
    with pytest.raises(UsageError, match="is up already"):
        state.refuse_second()
    with pytest.raises(UsageError, match="another cluster came up"):
        state.write("vllm", SPEC, {})

    sleeper.kill()
    sleeper.wait()

    state.refuse_second()
    assert state.read() is None


def test_a_damaged_state_file_is_an_error_that_says_what_to_do(tmp_path):
    """Nothing is guessed about processes."""
    (tmp_path / "state.json").write_text("{")

    with pytest.raises(UsageError, match="damaged"):
        StateFolder(tmp_path).read()
