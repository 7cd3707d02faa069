"""Microbench, sweep, plan."""
