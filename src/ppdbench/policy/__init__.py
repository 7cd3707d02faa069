"""Features to a decision, purely; the same objects in sweep, simulator and router."""
