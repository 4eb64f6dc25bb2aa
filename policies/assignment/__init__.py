"""Registered assignment policies: one file each, named after the policy."""
