"""Names of numbers that the engine's parts pass to each other. Not compiled."""

from __future__ import annotations

DEMAND = 0
BEHIND_DEMAND = 1
REPLACEMENT = 2
"""Priorities in a lane: prefetches go behind demand, replacements last."""

START = 0
WAIT = 1
DROP = 2
"""What becomes of a copy at the head of its queue."""

TURN = 0
KEPT = 1
COMPUTED = 2
FETCHED = 3
COPIED = 4
PREDICTED = 5
HAS_READ = 6
UNAWAITED = 7
AHEAD = 8
AWAITED_AHEAD = 9
"""What follows an operation's end: the process's turn (its worker goes on, or is kept),
a product's (of an expert that was fetched for a serial plan, too), a copy's, a
prediction's, a read's, nothing, and that of a product that nobody awaits yet, or again.
"""

LATE_DROP = 0
LATE_KEEP = 1
LATE_WAIT = 2
"""What becomes of a prefetch whose layer has come before its copy started."""

WHOLLY = 1
PARTLY = 2
"""For which of its tokens an active expert was computed ahead: real runs alone know of
some.
"""

NO_PLACE = 0
CACHED = 1
STAGED = 2
"""Where a copy that starts has found its place."""

RESERVED_SLOTS = 1
"""Staging slots that prefetches leave to demand: so it always finds one."""
