"""The policies that a configuration names, and the files that they come from."""

from __future__ import annotations

from pathlib import Path

from ppdbench.core.files import stamp_of
from ppdbench.policy.base import Policy
from ppdbench.policy.parse import parse_policy
from ppdbench.router.config import RouterConfig
from ppdbench.router.fitness import check_table

_TABLE = "table:"


def load_policy(config: RouterConfig) -> Policy:
    """The policy that routes.

    Raises:
        UsageError: an unknown name, or a table that does not fit the cluster.
    """
    return _load(config, config.policy)


async def check_policy(policy: Policy, config: RouterConfig) -> list[str]:
    """Hold a table against the live nodes; returns what an operator should read.

    Raises:
        UsageError: it was measured on something else, and that is not allowed.
    """
    table = getattr(policy, "table", None)
    if table is None:
        return []
    return await check_table(table.provenance, config.cluster, allow=config.allow_mismatch)


class Tables:
    """The table files of a configuration and whether they have changed since last asked.

    Made before they are read, so that no change in between goes unseen.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        names = (config.policy, config.shadow or "")
        self._paths = [Path(n.removeprefix(_TABLE)) for n in names if n.startswith(_TABLE)]
        self._seen = self._look()
        self._shadow: Policy | None = None

    def shadow(self) -> Policy | None:
        """The policy that is only asked, read anew."""
        name = self._config.shadow
        self._shadow = None if name is None else _load(self._config, name)
        return self._shadow

    def first_shadow(self) -> Policy | None:
        """The one that was read last, or now where none was: a bad file ends no worker."""
        return self._shadow or self.shadow()

    def changed(self) -> bool:
        """Whether a file differs from how it was at the last call, or at the start."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, ...] | None]:
        return [stamp_of(path) for path in self._paths]


def _load(config: RouterConfig, name: str) -> Policy:
    return parse_policy(name, lambda path: _table_policy(config, path))


def _table_policy(config: RouterConfig, path: str) -> Policy:
    from ppdbench.policy.table import load_table_policy

    return load_table_policy(path, str(config.cluster.topology))
