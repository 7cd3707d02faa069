"""From a policy's name to the policy."""

from __future__ import annotations

from collections.abc import Callable

from ppdbench.core.decision import Route
from ppdbench.core.errors import UsageError
from ppdbench.policy.base import Policy
from ppdbench.policy.fixed import AlwaysPolicy, RolesPolicy, SharePolicy, ThresholdPolicy

KNOWN = "roles, remote, local, pull, share:F, threshold:N, table:FILE"


def parse_policy(text: str, load_table: Callable[[str], Policy] | None = None) -> Policy:
    """Read a policy's name; :data:`KNOWN` lists the forms.

    ``load_table`` turns FILE into a policy; it is an argument so that this module reads no file.

    Raises:
        UsageError: an unknown name, or an argument that does not fit.
    """
    kind, _, argument = text.partition(":")
    if kind == "table" and load_table is not None and argument:
        return load_table(argument)
    try:
        return _parse_fixed(kind, argument)
    except (KeyError, ValueError):
        raise UsageError(f"unknown policy {text!r}; known policies: {KNOWN}") from None


def _parse_fixed(kind: str, argument: str) -> Policy:
    if kind == "share":
        return SharePolicy(float(argument))
    if kind == "threshold":
        return ThresholdPolicy(int(argument))
    if argument:
        raise ValueError(argument)
    if kind == "roles":
        return RolesPolicy()
    return AlwaysPolicy({r.value: r for r in (Route.REMOTE, Route.LOCAL, Route.PULL)}[kind])
