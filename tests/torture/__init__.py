"""Attacks on everything that moesim reads and writes, counted and seeded.

``make torture`` runs all suites at length; `tests/project/test_torture.py` runs a small part of
each. A suite reports what it tried and what failed, and every checker is itself proven
by faults put in on purpose.
"""
