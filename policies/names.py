"""Names of numbers that travel in arrays: lanes, states, flags of an answer.

This file is not compiled: a compiled module takes a constant in with `from
moesim.policies.names import NONE` and a line ``cdef int NONE`` in its `.pxd`.
"""

from __future__ import annotations

CPU = 0
"""Lane code of the CPU in an assignment; GPU *g* is ``1 + g``."""

DEFERRED = -1
"""Lane code of the CPU for an expert whose result joins one layer later; see
`AssignmentPolicy.defers`.
"""

ABSENT = 0
IN_FLIGHT = 1
RESIDENT = 2
"""States of an expert in one memory."""

NONE = -1
"""No expert: a declined admission, for one."""

UNUSED = 65535
"""Marks a place that no expert takes in a token's routing."""

SERIAL = 1
"""Flag of an assignment: the CPU begins only when every fetched expert has been
computed on its GPU.
"""

WAITS = 2
"""Flag of an assignment: no product of the layer step begins on a GPU before every copy
of the layer has landed; staging must be able to hold them all.
"""

PREFILL = 0
DECODE = 1
"""Phases, as in `Phase`."""
