"""The doctor: what a machine has, and what of it works."""
