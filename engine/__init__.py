"""The layer step, once, for any clock: operations, lanes, transfers, dispatch, join."""
