"""The machine: what its specification, its probes and its owner say about it."""
