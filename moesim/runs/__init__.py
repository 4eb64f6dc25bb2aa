"""Runs: their configuration, simulated and real, one or a sweep."""
