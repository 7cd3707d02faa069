"""A grid file: which points a sweep has, and the conversations of each (docs/workloads.md)."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ppdbench.core.conversation import Arrival
from ppdbench.core.errors import WorkloadError
from ppdbench.core.seeds import rng_for
from ppdbench.experiments.grid_file import Arm, GridTables, read_tables
from ppdbench.experiments.workload_entries import Workload
from ppdbench.runs.points import PointKey
from ppdbench.workload.arrivals import ArrivalProcess, arrival_times, expected_arrivals
from ppdbench.workload.content import TextMaker
from ppdbench.workload.dataset import RecordedTurns, prepare
from ppdbench.workload.synthetic import DrawnTurns
from ppdbench.workload.tokens import DEFAULT, load_tokenizer


@dataclass(frozen=True)
class EngineDefaults:
    """What a real engine is asked for: see ``[engine]`` in docs/workloads.md.

    ``replies`` is ``model`` (the model's own reply becomes history) or ``recorded``. ``prompts``
    is the form of synthetic requests: ``tokens`` or ``text``.
    """

    ignore_eos: bool = True
    temperature: float = 0.0
    replies: str = "model"
    prompts: str = "tokens"


@dataclass(frozen=True)
class Grid:
    """All points of a sweep. Equal seeds give equal schedules, whatever topology and policy.

    Under ``closed`` arrivals a point's ``rate_per_s`` is its number of users.
    ``settings`` are the backend options that the file (or its chosen variant) proposes.
    ``places`` are the only (workload, rate) pairs to run; ``None`` is the whole product.
    """

    name: str
    arms: tuple[Arm, ...]
    workloads: Mapping[str, Workload]
    rates_per_s: tuple[float, ...]
    repeats: int
    duration_s: float
    keep_records: bool
    arrivals: ArrivalProcess
    engine: EngineDefaults
    document: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[tuple[str, float], ...] | None = None

    @cached_property
    def digest(self) -> str:
        """Of what the file and those it names say, not of how they are laid out."""
        beside = {name: read for name in self.workloads if (read := self._read_beside(name))}
        return _digest({**self.document, "read": beside} if beside else self.document)

    def workload_digest(self, name: str) -> str:
        """Of the workload's entry, arrivals, pauses, ``[engine]``, and the data it draws from.

        Two runs with the same one served the same conversations.
        """
        entry = next(entry for entry in self.document["workload"] if entry["name"] == name)
        whole_grid = ("arrivals", "think", "duration_s", "engine")
        shared = {key: self.document.get(key) for key in whole_grid}
        workload = self.workloads[name]
        data = workload.prepared.info.digest if isinstance(workload, RecordedTurns) else None
        beside = self._read_beside(name)
        read = {"read": beside} if beside else {}
        return _digest({"entry": entry, "shared": shared, "data": data, **read})

    def _read_beside(self, name: str) -> dict[str, Any]:
        """What a workload takes from files that the grid names by path alone."""
        workload = self.workloads[name]
        lengths = workload.observed if isinstance(workload, DrawnTurns) else {}
        return lengths | ({"trace": self.arrivals.times_s} if self.arrivals.times_s else {})

    def points(self) -> list[PointKey]:
        """Arms in file order, then workload, rate, repeat."""
        return [
            PointKey(topology, policy, workload, rate, repeat)
            for arm in self.arms
            for topology in arm.topologies
            for policy in arm.policies
            for workload in self.workloads
            for rate in self.rates_per_s
            if self.places is None or (workload, rate) in self.places
            for repeat in range(self.repeats)
        ]

    def schedule(self, key: PointKey, root_seed: int) -> list[Arrival]:
        """The point's conversations and when each begins; no conversation stands in it twice."""
        point = f"{key.workload}/{key.rate_per_s:g}/{key.repeat}/"
        rng = rng_for(key.seed(root_seed), "schedule")
        workload = self.workloads[key.workload]
        times = arrival_times(self.arrivals, key.rate_per_s, self.duration_s, rng).tolist()
        return list(map(Arrival, times, workload.conversations(len(times), point, rng)))

    @property
    def has_words(self) -> bool:
        """Whether a real engine is sent texts, so that a tokenizer matters."""
        return bool(self._recorded()) or self.engine.prompts == "text"

    def users(self, key: PointKey) -> int | None:
        """How many conversations run at a time under closed arrivals; ``None`` for an open loop."""
        return int(key.rate_per_s) if self.arrivals.is_closed else None

    def with_content(
        self, key: PointKey, arrivals: Sequence[Arrival], served_tokenizer: str | None, seed: int
    ) -> list[Arrival]:
        """A schedule of ``key`` with its words, for real engines.

        Recorded conversations get their texts; as token ids where they are counted by the served
        model's own tokenizer (:meth:`counted_by`), so that client and server count the same.
        Synthetic ones stay without, which makes the driver draw token ids of exact length, unless
        the grid asks for ``prompts = "text"``.
        """
        workload = self.workloads[key.workload]
        if isinstance(workload, RecordedTurns):
            return workload.with_content(arrivals, as_ids=workload.tokenizer == served_tokenizer)
        if self.engine.prompts == "tokens":
            return list(arrivals)
        maker = TextMaker(load_tokenizer(served_tokenizer or DEFAULT), seed)
        return [Arrival(arrival.at_s, maker.fill(arrival.conversation)) for arrival in arrivals]

    def counted_by(self, tokenizer: str) -> Grid:
        """The same grid with recorded workloads counted by a model folder's own tokenizer.

        A workload whose file names a tokenizer keeps it.
        """
        workloads = {
            name: replace(workload, tokenizer=tokenizer)
            if isinstance(workload, RecordedTurns) and workload.tokenizer == DEFAULT
            else workload
            for name, workload in self.workloads.items()
        }
        return replace(self, workloads=workloads)

    def prepare(self, report: Callable[[str, int], None] = lambda _source, _count: None) -> None:
        """Read and keep the data of every recorded workload, so that points start at once.

        ``report`` is told a source and how many of its conversations are counted so far; a
        source that was kept earlier is not reported.
        """
        for workload in self._recorded():
            told = partial(report, workload.source)
            prepare(workload.source, workload.tokenizer, workload.selection, told)
            _ = workload.chats

    def notices(self) -> list[str]:
        """What a user should know of the data: files that are cut off."""
        return [
            f"{workload.source} is cut off at byte {account.truncated_at_byte}; the "
            f"{account.conversations.read} whole conversations before that are used"
            for workload in self._recorded()
            if (account := workload.prepared.info.account).truncated_at_byte is not None
        ]

    def expected_turns(self, keys: Iterable[PointKey]) -> float:
        """How many requests the points have, on average. Reads recorded workloads."""
        per_conversation = {name: w.mean_turns for name, w in self.workloads.items()}
        return sum(
            expected_arrivals(self.arrivals, key.rate_per_s, self.duration_s)
            * per_conversation[key.workload]
            for key in keys
        )

    def expected_offered_s(self, keys: Iterable[PointKey], token_s: float) -> float:
        """Seconds that the points take on engines at ``token_s`` per output token, no load.

        Arrivals, then the last conversation to its end; closed users one after the other.
        """
        per_conversation = {
            name: w.mean_output_tokens * token_s + w.mean_turns * w.think.mean_s
            for name, w in self.workloads.items()
        }
        rounds = self.arrivals.conversations_per_user if self.arrivals.is_closed else 1
        offered_s = 0.0 if self.arrivals.is_closed else self._arrivals_last_s
        return sum(offered_s + rounds * per_conversation[key.workload] for key in keys)

    @property
    def _arrivals_last_s(self) -> float:
        return min(self.duration_s, max(self.arrivals.times_s, default=self.duration_s))

    def _recorded(self) -> list[RecordedTurns]:
        return [w for w in self.workloads.values() if isinstance(w, RecordedTurns)]


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_grid(name_or_path: str) -> Grid:
    """``workloads/NAME.toml`` of the checkout or the package, or a path; ``@VARIANT`` picks one.

    Raises:
        WorkloadError: no such grid, not TOML, an unknown key, or a value that cannot be honoured.
    """
    name, variant = _name_and_variant(name_or_path)
    path = find_grid(name)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WorkloadError(
            f"grid {str(path)!r} is no TOML file ({error}); docs/workloads.md has an example"
        ) from error
    return _grid(path, read_tables(path, document, variant))


def _name_and_variant(name_or_path: str) -> tuple[str, str]:
    """Folders may have an ``@`` in their names, too."""
    if Path(name_or_path).expanduser().is_file() or "@" not in name_or_path:
        return name_or_path, ""
    name, _, variant = name_or_path.rpartition("@")
    return name, variant


def _grid(path: Path, tables: GridTables) -> Grid:
    name = path.stem if not tables.variant else f"{path.stem}@{tables.variant}"
    return Grid(
        name=name,
        arms=tables.arms,
        workloads={workload.name: workload for workload in tables.workloads},
        rates_per_s=tables.rates_per_s,
        repeats=tables.repeats,
        duration_s=tables.duration_s,
        keep_records=tables.keep_records,
        arrivals=tables.arrivals,
        engine=EngineDefaults(**tables.engine),
        document=tables.document,
        settings=tables.settings,
        places=tables.places,
    )


def find_grid(name: str) -> Path:
    """A path that exists, else the shipped grid of that name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    for folder in grid_folders():
        if (found := folder / f"{name}.toml").is_file():
            return found
    raise WorkloadError(
        f"grid {name!r}: neither a file nor a shipped grid; shipped are "
        f"{', '.join(shipped_grids()) or 'none'}"
    )


def shipped_grids() -> list[str]:
    return sorted({path.stem for folder in grid_folders() for path in folder.glob("*.toml")})


def grid_folders() -> list[Path]:
    """``workloads/`` of the checkout this code lies in, then the copy inside the package."""
    package = Path(str(importlib.resources.files("ppdbench")))
    candidates = (package.parents[1] / "workloads", package / "_workloads")
    return [folder for folder in candidates if folder.is_dir()]
