"""Improves a profile by finished real runs of any trace or model."""
