"""Registered prefetch policies: one file each, named after the policy."""
