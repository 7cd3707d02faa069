"""One TOML table, checked key by key."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

from ppdbench.core.errors import WorkloadError

_REQUIRED = object()


class Table:
    """One TOML table under inspection: every key is taken once, and what is left is an error."""

    def __init__(self, path: Path, where: str, values: object) -> None:
        if not isinstance(values, dict):
            raise WorkloadError(f"grid {str(path)!r}: {where} must be a table, not {values!r}")
        self.path, self.where = path, where
        self._values = dict(values)
        self._known: list[str] = []

    def take(self, key: str, kinds: type | tuple[type, ...], default: object = _REQUIRED) -> Any:  # noqa: ANN401 — TOML values, checked here
        """The value, of one of ``kinds``; a number also where only ``float`` is allowed."""
        self._known.append(key)
        if key not in self._values:
            if default is _REQUIRED:
                raise self.error(key, "is missing")
            return default
        value = self._values.pop(key)
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        wanted = (*allowed, int) if float in allowed else allowed
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join(kind.__name__ for kind in allowed)
            raise self.error(key, f"is {value!r}; expected {names}")
        return value

    def take_positive(self, key: str, default: object = _REQUIRED) -> float:
        value = self.take(key, float, default)
        if not 0 < value < math.inf:
            raise self.error(key, f"is {value!r}; expected a number above 0")
        return float(value)

    def take_count(self, key: str, default: object = _REQUIRED, *, least: int = 1) -> Any:  # noqa: ANN401 — TOML values, checked here
        value = self.take(key, int, default)
        if value is not None and value < least:
            raise self.error(key, f"is {value!r}; expected a whole number from {least} on")
        return value

    def take_names(self, key: str, default: object = _REQUIRED) -> tuple[str, ...]:
        values = self.take(key, list, default)
        if not all(isinstance(value, str) and value for value in values):
            raise self.error(key, f"is {values!r}; expected a list of names")
        return tuple(values)

    def has(self, key: str) -> bool:
        """Whether it is there and not yet taken; makes the key a known one."""
        self._known.append(key)
        return key in self._values

    def one_of(self, *keys: str) -> str:
        """The one key of these that is there; none or several is an error."""
        given = [key for key in keys if key in self._values]
        if len(given) != 1:
            shown = ", ".join(f"`{key}`" for key in keys)
            raise self.error(keys[0], f"must be given, or another of {shown}; exactly one of them")
        return given[0]

    def table(self, key: str) -> Table:
        return Table(self.path, f"[{key}]", self.take(key, dict, {}))

    def close(self) -> None:
        for key in self._values:
            near = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(self._known)}"
            raise self.error(key, f"is not known here; {hint}")

    def error(self, key: str, what: str) -> WorkloadError:
        return WorkloadError(f"grid {str(self.path)!r}, {self.where}: `{key}` {what}")
