"""Attacks on everything that moesim reads and writes, drawn and seeded.

``make torture`` draws many (``ATTACKS=N`` of each); `make test` a few. Every judge is
itself proven by faults put in on purpose.
"""

import os

import hypothesis

ATTACKS = int(os.environ.get("ATTACKS", "10"))
IS_LONG = "ATTACKS" in os.environ

attacks = hypothesis.settings(
    max_examples=ATTACKS,
    deadline=None,
    database=None,
    derandomize=not IS_LONG,
    # A failure names its seed; a smaller seed is no smaller attack.
    phases=[hypothesis.Phase.generate],
)
