"""The TOML schema of a grid, checked key by key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppdbench.core.errors import UsageError
from ppdbench.core.topology import Topology
from ppdbench.experiments.toml_table import Table
from ppdbench.experiments.workload_entries import Workload, read_think, read_workloads
from ppdbench.workload.arrivals import PROCESSES, ArrivalProcess, read_trace
from ppdbench.workload.dataset import RecordedTurns
from ppdbench.workload.think import ThinkTime

LEAST_EXPECTED, MOST_EXPECTED = 0.01, 1e7
"""Conversations in a point: fewer and nearly every draw is empty, more and no memory holds them."""

LEAST_CV, MOST_CV = 0.001, 100.0
"""Of gamma gaps; beyond, their shape leaves what a float can draw."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Topologies × policies that run the whole product of workloads, rates and repeats."""

    topologies: tuple[str, ...]
    policies: tuple[str, ...]


@dataclass(frozen=True)
class GridTables:
    """A grid file, read and checked, with its variant already laid over it."""

    variant: str
    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    rates_per_s: tuple[float, ...]
    places: tuple[tuple[str, float], ...] | None
    repeats: int
    duration_s: float
    keep_records: bool
    arrivals: ArrivalProcess
    engine: Mapping[str, Any]
    settings: Mapping[str, Any]
    document: Mapping[str, Any]


def read_tables(path: Path, document: Mapping[str, Any], variant: str) -> GridTables:
    """Check every key; lay the variant's ``settings`` over the file's."""
    top = Table(path, "top level", document)
    top.take("title", str, "")
    think = read_think(top.table("think"), ThinkTime())
    settings = _settings(top, variant)
    arrivals = _arrivals(top.table("arrivals"), path)
    duration_s = top.take("duration_s", float, None)
    workloads, rates_per_s = read_workloads(top, think), _rates(top, arrivals)
    tables = GridTables(
        variant=settings.name,
        arms=_arms(top),
        workloads=workloads,
        rates_per_s=rates_per_s,
        places=_places(top, [(w.name, rate) for w in workloads for rate in rates_per_s]),
        repeats=top.take_count("repeats", 1),
        duration_s=_duration(top, duration_s, arrivals),
        keep_records=top.take("keep_records", bool, default=False),
        arrivals=arrivals,
        engine=_engine(top.table("engine")),
        settings=settings.values,
        document={**document, "variant": settings.name},
    )
    top.close()
    _check_replies(top, tables)
    if arrivals.process not in ("trace", "closed"):
        _check_sizes(top, rates_per_s, tables.duration_s)
    return tables


def _check_replies(top: Table, tables: GridTables) -> None:
    made_up = [w.name for w in tables.workloads if not isinstance(w, RecordedTurns)]
    if tables.engine.get("replies") == "recorded" and made_up:
        raise top.error(
            "engine", f"asks for recorded replies, but workload {made_up[0]!r} is synthetic"
        )


def _arms(top: Table) -> tuple[Arm, ...]:
    entries = top.take("arm", list)
    arms = [_arm(Table(top.path, f"[[arm]] {i}", entry)) for i, entry in enumerate(entries, 1)]
    pairs = [(t, p) for arm in arms for t in arm.topologies for p in arm.policies]
    if not pairs or len(set(pairs)) != len(pairs):
        raise top.error("arm", "must name each (topology, policy) once, and at least one")
    return tuple(arms)


def _arm(table: Table) -> Arm:
    arm = Arm(table.take_names("topologies"), table.take_names("policies"))
    table.close()
    for name in arm.topologies:
        try:
            Topology.parse(name)
        except UsageError as error:
            raise table.error("topologies", f"has {name!r}: {error}") from error
    return arm


def _rates(top: Table, arrivals: ArrivalProcess) -> tuple[float, ...]:
    """Rates; or the users of a closed loop; or the one rate that a trace has."""
    rates = top.take("rates_per_s", list, None)
    users = top.take("users", list, None)
    if arrivals.process == "trace":
        if rates is not None or users is not None:
            raise top.error("rates_per_s", "cannot be chosen: a trace has its own rate")
        return (len(arrivals.times_s) / max(arrivals.times_s[-1], 1e-9),)
    wanted, key, other = (
        (users, "users", rates) if arrivals.is_closed else (rates, "rates_per_s", users)
    )
    if other is not None:
        raise top.error(
            "rates_per_s" if arrivals.is_closed else "users",
            f"cannot be honoured by {arrivals.process} arrivals; give `{key}`",
        )
    return _numbers(top, key, wanted, whole=arrivals.is_closed)


def _numbers(top: Table, key: str, values: list[Any] | None, *, whole: bool) -> tuple[float, ...]:
    kinds = (int,) if whole else (int, float)
    good = bool(values) and all(
        isinstance(v, kinds) and not isinstance(v, bool) and 0 < v < math.inf for v in values or ()
    )
    if not good or len(set(values or ())) != len(values or ()):
        raise top.error(key, f"is {values!r}; expected different numbers above 0")
    return tuple(map(float, values or ()))


def _places(top: Table, product: list[tuple[str, float]]) -> tuple[tuple[str, float], ...] | None:
    """The only (workload, rate) pairs to run; without the key the whole product is."""
    given = top.take("places", list, None)
    if given is None:
        return None
    places = [tuple(place) if isinstance(place, list) else place for place in given]
    wrong = [place for place in places if place not in product]
    if wrong or not places:
        raise top.error(
            "places", f"has {wrong or places!r}; expected [workload, rate] pairs of this grid"
        )
    return tuple(place for place in product if place in places)


def _duration(top: Table, duration_s: float | None, arrivals: ArrivalProcess) -> float:
    if arrivals.is_closed and duration_s is not None:
        raise top.error("duration_s", "cannot be honoured by closed arrivals, which end by count")
    if duration_s is None and arrivals.process in ("trace", "closed"):
        return math.inf
    if duration_s is None or not 0 < duration_s < math.inf:
        raise top.error("duration_s", f"is {duration_s!r}; expected seconds of arrivals, above 0")
    if arrivals.times_s and arrivals.times_s[0] >= duration_s:
        raise top.error(
            "duration_s", f"is {duration_s!r}, but the trace begins at {arrivals.times_s[0]:g} s"
        )
    return float(duration_s)


def _check_sizes(top: Table, rates_per_s: tuple[float, ...], duration_s: float) -> None:
    """A point needs a conversation and has to fit into memory."""
    for rate in rates_per_s:
        if not LEAST_EXPECTED <= rate * duration_s <= MOST_EXPECTED:
            raise top.error(
                "duration_s",
                f"× {rate:g} conversations per second is {rate * duration_s:g} conversations; "
                f"expected {LEAST_EXPECTED:g} to {MOST_EXPECTED:g} in a point",
            )


def _arrivals(table: Table, path: Path) -> ArrivalProcess:
    process = table.take("process", str, "poisson")
    if process not in PROCESSES:
        raise table.error("process", f"is {process!r}; expected one of {', '.join(PROCESSES)}")
    arrivals = ArrivalProcess(process)
    if process == "gamma":
        arrivals = replace(arrivals, cv=_gamma_cv(table))
    if process == "trace":
        file = path.parent / table.take("file", str)
        arrivals = replace(arrivals, times_s=read_trace(file))
    if arrivals.is_closed:
        per_user = table.take_count("conversations_per_user")
        arrivals = replace(arrivals, conversations_per_user=per_user)
    table.close()
    return arrivals


def _gamma_cv(table: Table) -> float:
    """``cv``, or ``burstiness`` as vLLM counts it: the gamma's shape, 1/cv²."""
    cv = table.take("cv", float, None)
    burstiness = table.take("burstiness", float, None)
    if (cv is None) == (burstiness is None):
        raise table.error("cv", "or `burstiness` must be given, exactly one of them")
    value = float(cv if cv is not None else burstiness**-0.5 if burstiness > 0 else -1)
    if not LEAST_CV <= value <= MOST_CV:
        raise table.error(
            "cv" if cv is not None else "burstiness",
            f"gives gaps a variation of {value:g}; expected {LEAST_CV:g} to {MOST_CV:g}",
        )
    return value


_ENGINE_CHOICES = {"replies": ("model", "recorded"), "prompts": ("tokens", "text")}


def _engine(table: Table) -> dict[str, Any]:
    """Only what the file says; the defaults stand in ``EngineDefaults``."""
    found: dict[str, Any] = {}
    if table.has("ignore_eos"):
        found["ignore_eos"] = table.take("ignore_eos", bool)
    if table.has("temperature"):
        found["temperature"] = table.take("temperature", float)
        if not 0 <= found["temperature"] < math.inf:
            raise table.error("temperature", f"is {found['temperature']!r}; expected 0 or more")
    for key, choices in _ENGINE_CHOICES.items():
        if table.has(key):
            found[key] = table.take(key, str)
            if found[key] not in choices:
                raise table.error(key, f"is {found[key]!r}; expected {' or '.join(choices)}")
    table.close()
    return found


@dataclass(frozen=True)
class _Settings:
    name: str
    values: Mapping[str, Any]


def _settings(top: Table, variant: str) -> _Settings:
    """The file's ``[settings]`` under those of the chosen variant, or of the first one."""
    common = top.take("settings", dict, {})
    variants = top.take("variant", dict, {})
    if not variants:
        if variant:
            raise top.error("variant", f"{variant!r} was asked for, but this grid has none")
        return _Settings("", common)
    chosen = variant or next(iter(variants))
    if chosen not in variants:
        raise top.error("variant", f"has no {chosen!r}; expected one of {', '.join(variants)}")
    return _Settings(chosen, {**common, **variants[chosen]})
