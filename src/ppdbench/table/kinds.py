"""What kind of value each field of a table file holds, checked before anything is derived from it.

The digest tells that a file is as its writer left it, not that the writer was ``ppd``: whoever
renews the digest after an edit must meet a sentence, too, and not an error deep in a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ppdbench.core.topology import Topology
from ppdbench.table.score import STATISTICS

LARGEST = 1e18
"""Above any token count, rate or time; below where products of two figures leave a float."""

Holds = Callable[[Any], bool]


def number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= LARGEST  # type: ignore[arg-type]


def positive(value: Any) -> bool:  # noqa: ANN401
    return number(value) and value > 0


def count(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int) and number(value) and value >= 0


def share(value: Any) -> bool:  # noqa: ANN401
    return number(value) and 0 <= value <= 1


def text(value: object) -> bool:
    return isinstance(value, str)


def topology(value: object) -> bool:
    """Raises UsageError for a text that names none."""
    return isinstance(value, str) and bool(Topology.parse(value).nodes)


def optional(holds: Holds) -> Holds:
    def known_or_null(value: object) -> bool:
        return value is None or holds(value)

    known_or_null.__name__ = f"{holds.__name__} or null"
    return known_or_null


def texts(value: object) -> bool:
    return isinstance(value, list) and all(map(text, value))


def named_texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(text, value.values()))


def runs(value: object) -> bool:
    return isinstance(value, list) and all(named_texts(run) and "digest" in run for run in value)


def figures(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == set(STATISTICS)
        and all(map(optional(lambda v: number(v) and v >= 0), value.values()))
    )


def ranges(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(v, list) and len(v) == 2 and all(map(number, v)) for v in value.values()
    )


def replicates(value: object) -> bool:
    """Equally many whole numbers of each part of S."""
    if not isinstance(value, Mapping) or not {"d_ttft", "d_tpot"} <= set(value):
        return False
    lists = list(value.values())
    whole = all(isinstance(v, list) and all(type(x) is int for x in v) for v in lists)
    return whole and len({len(v) for v in lists}) == 1 and len(lists[0]) > 0


SIDE: Mapping[str, Holds] = {
    "n": count,
    "success": share,
    "ttft_s": figures,
    "tpot_s": figures,
    "all_tpot_s": figures,
    "meets_slo": optional(share),
}
CELL: Mapping[str, Holds] = {
    "topology": topology,
    "workload": text,
    "backend": text,
    "context_tokens": positive,
    "new_tokens": positive,
    "output_tokens": positive,
    "rate_per_s": positive,
    "repeats": count,
    "replica_topology": optional(text),
    "spread": optional(ranges),
    "replicates": optional(replicates),
}
RULE: Mapping[str, Holds] = {
    "min_success": share,
    "min_n": count,
    "max_distance": optional(positive),
}
WEIGHTS: Mapping[str, Holds] = {"w_ttft": number, "w_tpot": number}
PROVENANCE: Mapping[str, Holds] = {
    "backend": text,
    "grids": texts,
    "bases": texts,
    "pairs": named_texts,
    "runs": runs,
}
"""Of what is there: the rest of the provenance is only shown."""


def check(document: Mapping[str, Any], kinds: Mapping[str, Holds], where: str) -> None:
    """Raises ValueError that names the field and its value."""
    for name, holds in kinds.items():
        if not holds(document[name]):
            shown = str(document[name])[:60]
            raise ValueError(f"{where}: {name} is {shown!r}, expected {holds.__name__}")


def check_provenance(value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"provenance is {str(value)[:60]!r}")
    check(value, {k: holds for k, holds in PROVENANCE.items() if k in value}, "provenance")
