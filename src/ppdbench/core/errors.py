"""One error tree. A message says what happened, which value, what was expected, what to do next."""

from __future__ import annotations


class PpdError(Exception):
    """Base of every error a user may see; the CLI prints the text and exits with ``exit_code``."""

    exit_code = 1


class NothingUsableError(PpdError):
    """The work is done and nothing usable came out (exit 1)."""

    exit_code = 1


class UsageError(PpdError):
    """Wrong use or bad input: an option, a file, a name (exit 2)."""

    exit_code = 2


class WorkloadError(UsageError):
    """A dataset, grid or tokenizer that cannot be used."""


class RunError(UsageError):
    """A run folder that is missing, locked, damaged, or differs from what was asked."""


class TableError(UsageError):
    """A table that is damaged, of another schema version, or built from runs that may not mix."""


class EngineError(PpdError):
    """The engine or the machine is not up to it: a node died, a port is taken (exit 3)."""

    exit_code = 3
