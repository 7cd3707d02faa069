"""The conversation state machine, the drivers, measuring."""
