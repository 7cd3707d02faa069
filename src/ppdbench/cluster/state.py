"""What ``ppd cluster up`` leaves in its state folder, so that ``down`` ends that and no more."""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppdbench.cluster.contract import ClusterSpec, Node, read_role, write_cluster
from ppdbench.cluster.processes import Started, boot_id, stop
from ppdbench.core.errors import UsageError

_SCHEMA = 2
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A detached cluster. ``processes`` are by node name, of the boot ``boot`` of ``host``."""

    backend: str
    spec: ClusterSpec
    processes: Mapping[str, Started]
    boot: str
    host: str

    def alive(self, node: Node) -> bool:
        """Whether the process we started for ``node`` still runs."""
        return self.boot == boot_id() and self.processes[node.name].alive()


class StateFolder:
    """One cluster at most. Holds ``state.json``, ``cluster.toml`` and ``logs/``.

    ``cluster.toml`` is for others to read; nothing here depends on what became of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"<StateFolder {self.folder}>"

    @property
    def cluster_file(self) -> Path:
        return self.folder / "cluster.toml"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def _file(self) -> Path:
        return self.folder / "state.json"

    @property
    def _lock(self) -> Path:
        return self.logs / "start.lock"

    def read(self) -> ClusterState | None:
        """The cluster that was put up here, ``None`` when there is none.

        Raises:
            UsageError: the state file is damaged, or another host's.
        """
        try:
            document = json.loads(self._file.read_text())
            state = _state(document)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, UsageError) as error:
            raise UsageError(
                f"state file {self._file} is damaged ({error}); end its processes by hand, "
                "then remove it"
            ) from error
        self._refuse_elsewhere(state)
        return state

    def _refuse_elsewhere(self, state: ClusterState) -> None:
        """Only on their own host can anyone tell whether nodes live; to forget them leaks them."""
        if state.host != socket.gethostname():
            raise UsageError(
                f"the {state.spec.topology} cluster in {self.folder} was put up on {state.host!r} "
                f"and this is {socket.gethostname()!r}; run `ppd cluster down` there, choose "
                f"another folder with --state, or remove {self._file} if that host is gone"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For the length of a start: no other one writes its logs here.

        Raises:
            UsageError: another start is under way.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another cluster is being started in {self.folder}; wait for it, or choose "
                    "another folder with --state"
                ) from None
            yield

    def refuse_second(self) -> None:
        """Make sure that a cluster may be put up here; what is left of a dead one is removed.

        Raises:
            UsageError: one is up already.
        """
        state = self.read()
        if state is None:
            return
        if any(state.alive(node) for node in state.spec.nodes):
            raise UsageError(
                f"a {state.spec.topology} cluster is up already (state in {self.folder}); "
                "`ppd cluster down` ends it, or choose another folder with --state"
            )
        self._remove()

    def write(self, backend: str, spec: ClusterSpec, processes: Mapping[str, Started]) -> None:
        """Record a cluster that is ready.

        Raises:
            UsageError: another one was recorded here meanwhile.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {
            "schema": _SCHEMA,
            "backend": backend,
            "boot": boot_id(),
            "host": socket.gethostname(),
            "nodes": [
                {"name": node.name, "role": node.role.value, "url": node.url,
                 "pid": processes[node.name].pid,
                 "start_ticks": processes[node.name].start_ticks}
                for node in spec.nodes
            ],
        }  # fmt: skip
        try:
            with self._file.open("x") as file:
                json.dump(document, file, indent=1)
        except FileExistsError:
            raise UsageError(f"another cluster came up in {self.folder} meanwhile") from None
        write_cluster(spec, self.cluster_file)

    def down(self) -> ClusterState | None:
        """End what was started here, wait until it is gone, forget it; logs stay.

        Raises:
            UsageError: the state file is damaged, or another host's.
        """
        state = self.read()
        if state is None:
            return None
        if state.boot == boot_id():
            stop(state.processes.values(), _GRACE_S)
        self._remove()
        return state

    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)
        self.cluster_file.unlink(missing_ok=True)


def _state(document: Mapping[str, Any]) -> ClusterState:
    nodes = document["nodes"]
    return ClusterState(
        document["backend"],
        ClusterSpec(tuple(Node(n["name"], read_role(n["role"]), n["url"]) for n in nodes)),
        {n["name"]: Started(int(n["pid"]), int(n["start_ticks"])) for n in nodes},
        document["boot"],
        document.get("host", socket.gethostname()),  # files of earlier versions do not say
    )
