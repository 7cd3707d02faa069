"""Per-turn records as Parquet, one row per turn, the columns of :class:`TurnRecord`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppdbench.core.decision import Route
from ppdbench.runs.records import COLUMNS, Outcome, TurnRecord

RECORDS, WARM_UP = "records", "warm_up"


def records_as_parquet(records: Sequence[TurnRecord]) -> dict[str, bytes]:
    """Parquet bytes by folder: measured turns and, where there were any, warm-up apart."""
    kinds = {
        RECORDS: [record for record in records if not record.warm_up],
        WARM_UP: [record for record in records if record.warm_up],
    }
    return {kind: _parquet(chosen) for kind, chosen in kinds.items() if chosen}


def read_records(folder: Path, slug: str, kind: str = RECORDS) -> list[TurnRecord]:
    """A point's records back; empty where the run kept none."""
    import pyarrow.parquet as pq

    path = folder / kind / f"{slug}.parquet"
    if not path.exists():
        return []
    return [_record(row) for row in pq.read_table(path).to_pylist()]


def _parquet(records: Sequence[TurnRecord]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [getattr(record, name) for record in records] for name in COLUMNS}
    arrays = {name: pa.array(values, type=_types().get(name)) for name, values in columns.items()}
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays), buffer, compression="zstd")
    return buffer.getvalue()


def _types() -> dict[str, Any]:
    """Types that an all-empty column cannot show by itself."""
    import pyarrow as pa

    instants = ("scheduled_at_s", "sent_at_s", "first_token_at_s", "finished_at_s")
    counts = ("prompt_tokens", "cached_tokens", "output_tokens", "recomputed_tokens", "bytes_moved")
    return {
        **dict.fromkeys(instants, pa.float64()),
        **dict.fromkeys(counts, pa.int64()),
        "prefill_node": pa.string(),
        "token_at_s": pa.list_(pa.float64()),
    }


def _record(row: dict[str, Any]) -> TurnRecord:
    return TurnRecord(**{**row, "route": Route(row["route"]), "outcome": Outcome(row["outcome"])})
