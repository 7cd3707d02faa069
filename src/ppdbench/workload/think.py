"""Pauses between a reply and the user's next request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KINDS = ("none", "fixed", "exponential", "lognormal", "recorded")


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """How long users pause; no pause is longer than ``max_s``.

    ``seconds`` is the value under ``fixed``, the mean under ``exponential``, the median under
    ``lognormal``, whose log deviation is ``sigma``. ``recorded`` takes the data's own pauses.
    """

    kind: str = "none"
    seconds: float = 0.0
    sigma: float = 0.0
    max_s: float = float("inf")

    @property
    def mean_s(self) -> float:
        """For estimates: the median under ``lognormal``, 0 under ``recorded``, uncut."""
        return self.seconds

    def draw(self, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        return np.minimum(self._raw(n, rng), self.max_s)

    def _raw(self, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        if self.kind == "exponential":
            return rng.standard_exponential(n) * self.seconds
        if self.kind == "lognormal":
            return self.seconds * np.exp(self.sigma * rng.standard_normal(n))
        return np.full(n, self.seconds)


NO_PAUSE = ThinkTime()
