"""The layer step, once, for any clock: planner, memories, transfers, lanes, join."""
