"""Registered cache policies: one file each, named after the policy."""
