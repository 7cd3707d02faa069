"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No timed assertion in a unit test: a busy machine must not fail a property that holds.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
