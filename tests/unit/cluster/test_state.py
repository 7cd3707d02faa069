from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
        lambda document: document | {"nodes": [document["nodes"][0] | {"start_ticks": 1}]},
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
        state.write("vllm", SPEC, {"r0": started(sleeper.pid)})

    sleeper.kill()
    sleeper.wait()

    state.refuse_second()
    assert state.read() is None


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": 3}', '{"nodes": [], "backend": "sim"}'])
def test_a_damaged_state_file_is_an_error_that_says_what_to_do(tmp_path, text):
    """Nothing is guessed about processes."""
    (tmp_path / "state.json").write_text(text)

    with pytest.raises(UsageError, match="damaged"):
        StateFolder(tmp_path).read()


def test_a_file_that_names_no_host_is_this_ones(tmp_path, sleeper):
    """Earlier versions wrote none, and their nodes must be ended too."""
    state = recorded(tmp_path, sleeper)
    file = tmp_path / "state.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in document.items() if k != "host"}))

    state.down()

    assert sleeper.wait(timeout=5) != 0


def test_another_hosts_cluster_is_neither_ended_nor_forgotten(tmp_path, sleeper):
    """A home folder shared by hosts: only where the nodes run can anyone tell that they do."""
    state = recorded(tmp_path, sleeper)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "login-1", "boot": "b"}))

    for act in (state.read, state.down, state.refuse_second):
        with pytest.raises(UsageError, match="put up on 'login-1'"):
            act()

    assert file.exists()
    assert sleeper.poll() is None


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_text("[[node]]")])
def test_down_does_not_need_the_cluster_file(tmp_path, sleeper, change):
    """It is the user's to edit, move and remove; the nodes are known and ended all the same."""
    state = recorded(tmp_path, sleeper)
    change(state.cluster_file)
    assert state.read().spec == SPEC

    state.down()

    assert sleeper.wait(timeout=5) != 0
    assert list(tmp_path.iterdir()) == []


def test_two_starts_in_one_folder_are_told_apart_before_any_node_starts(tmp_path):
    """The second would write into the first one's logs and be refused minutes later."""
    with (
        StateFolder(tmp_path / "new").alone(),
        pytest.raises(UsageError, match="is being started"),
        StateFolder(tmp_path / "new").alone(),
    ):
        pass

    with StateFolder(tmp_path / "new").alone():
        assert [file.name for file in (tmp_path / "new").iterdir()] == ["logs"]
