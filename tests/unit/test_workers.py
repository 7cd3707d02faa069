"""Work over processes: every answer once, errors home, and nothing outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ppdbench.core.errors import EngineError, UsageError
from ppdbench.experiments.workers import in_parallel

SRC = Path(__file__).parents[2] / "src"


def work(question: int) -> tuple[int, int]:
    if question < 0:
        raise UsageError(f"no answer to {question}")
    if question == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return question, os.getpid()


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """A spawned worker finds this module by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(sys.modules, "test_workers", sys.modules[__name__])
    monkeypatch.setattr(work, "__module__", "test_workers")


def test_each_question_is_answered_once_by_another_process():
    """Two workers share twenty questions; none is lost or doubled."""
    answers = list(in_parallel(work, range(20), 2))

    assert sorted(question for question, _ in answers) == list(range(20))
    assert os.getpid() not in {pid for _, pid in answers}


def test_one_worker_is_this_process():
    """No process is started where none can help, and the order stays."""
    assert list(in_parallel(work, [3, 1], 1)) == [(3, os.getpid()), (1, os.getpid())]


def test_an_error_of_a_worker_is_raised_here_as_itself():
    """Bad input keeps its type, so that it keeps its exit code."""
    with pytest.raises(UsageError, match="no answer to -1"):
        list(in_parallel(work, [1, -1, 2], 2))


def test_a_killed_worker_is_an_engine_error():
    """A worker that vanishes is said so and not waited for."""
    with pytest.raises(EngineError, match="exit code -9"):
        list(in_parallel(work, [99, 99], 2))


def test_workers_die_with_a_parent_that_is_killed():
    """SIGKILL leaves the parent no time to clean up, and still no worker stays."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import time\n"
        "from ppdbench.experiments.workers import in_parallel\n"
        "if __name__ == '__main__':\n"
        "    for _ in in_parallel(time.sleep, [0, 0, 60, 60], 2): print('one', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(SRC)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout.readline() == parent.stdout.readline() == b"one\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=10)

    assert len(children) >= 2
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
