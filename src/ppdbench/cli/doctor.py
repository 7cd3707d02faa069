"""``ppd doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppdbench.cli.output import command, say, show, show_json

if TYPE_CHECKING:
    from ppdbench.experiments.checks import Check
    from ppdbench.load.selftest import Capability

EPILOG = "Example: ppd doctor --load --json"


@command
def doctor(
    *,
    load: Annotated[
        bool, typer.Option("--load", help="Measure what the load client can do (about 15 s).")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.2, help="With --load: length of each phase.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001
) -> None:
    """Self-tests: is this machine, and is this client, up to measuring?

    With --load the client runs against an instant engine in another process, beside a bare
    blocking socket at the same rate.
    """
    from ppdbench.experiments.checks import run_checks

    checks = list(run_checks())
    capability = _measure(seconds) if load else None
    if as_json:
        show_json(_document(checks, capability))
    else:
        _show(checks, capability)
    if any(check.ok is False for check in checks):
        raise typer.Exit(3)


def _measure(seconds: float) -> Capability:
    from ppdbench.load.selftest import measure_capability

    say(f"doctor: measuring the load client, about {8 * seconds:.0f} s")
    return measure_capability(seconds)


def _document(checks: list[Check], capability: Capability | None) -> dict[str, Any]:
    from dataclasses import asdict

    document: dict[str, Any] = {"checks": {c.name: {"ok": c.ok, "said": c.said} for c in checks}}
    if capability is not None:
        document |= asdict(capability)
        document["targets_met"] = {t.name: t.met for t in capability.targets()}
    return document


def _show(checks: list[Check], capability: Capability | None) -> None:
    words = {True: "ok", False: "FAILED", None: "absent"}
    for check in checks:
        show(f"{words[check.ok]:7} {check.name}: {check.said}")
    for target in capability.targets() if capability is not None else ():
        met = "ok" if target.met else "MISSED"
        show(f"{met:7} {target.name}: {target.value:.6g} (wanted {target.wanted})")
