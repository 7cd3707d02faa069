"""Lengths that are drawn: fixed, uniform, lognormal, gamma, or from a file of observed ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers ≥ 1, cut to [``low``, ``high``].

    ``kind`` is ``fixed`` (a), ``uniform`` (from a to b, both included), ``lognormal`` (median a,
    log deviation b), ``gamma`` (mean a, coefficient of variation b) or ``observed`` (drawn with
    replacement from ``values``).
    """

    kind: str
    a: float = 1
    b: float = 0
    values: tuple[int, ...] = ()
    low: int = 1
    high: int = 2**31 - 1

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        return np.clip(np.rint(self._raw(n, rng)), self.low, self.high).astype(np.int64)

    @property
    def mean(self) -> float:
        """Before cutting and rounding; for estimates."""
        if self.kind == "uniform":
            return (self.a + self.b) / 2
        if self.kind == "lognormal":
            return self.a * math.exp(self.b**2 / 2)
        return float(np.mean(self.values)) if self.kind == "observed" else self.a

    def _raw(self, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b), n, endpoint=True).astype(np.float64)
        if self.kind == "lognormal":
            return self.a * np.exp(self.b * rng.standard_normal(n))
        if self.kind == "gamma":
            shape = self.b**-2
            return rng.standard_gamma(shape, n) * (self.a / shape)
        if self.kind == "observed":
            return np.asarray(self.values, dtype=np.float64)[rng.integers(len(self.values), size=n)]
        return np.full(n, self.a)
