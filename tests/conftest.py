"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No timed assertion in a unit test: a busy machine must not fail a property that holds.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
