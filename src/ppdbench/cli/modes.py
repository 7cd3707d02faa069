"""Options that belong to one mode: beside another they are refused, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import typer

SPELLED = {"source": "--from", "out": "-o"}

DEVICES_OF = {"gpus": ("cuda",), "tp": ("cuda",), "kv_cache_gib": ("cpu",)}
"""Of a launched vLLM."""


def typed_options(context: typer.Context) -> set[str]:
    """Names of the options that were given, whatever their value."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, found in sources.items() if found and found.name == "COMMANDLINE"}


def refuse_elsewhere(
    typed: Collection[str], owners: Mapping[str, tuple[str, ...]], option: str, chosen: str
) -> None:
    """``owners`` says with which values of ``option`` a name is read; other names always are.

    Raises:
        UsageError: naming the first option that ``chosen`` does not read, and where it belongs.
    """
    from ppdbench.core.errors import UsageError

    for name in sorted(set(typed) & owners.keys()):
        if chosen not in owners[name]:
            raise UsageError(
                f"{spelled(name)} belongs to --{option} {' or '.join(owners[name])} and would "
                f"do nothing with --{option} {chosen}; leave it out or choose that {option}"
            )


def spelled(name: str) -> str:
    """A parameter's name as a user types it."""
    return SPELLED.get(name, "--" + name.replace("_", "-"))
