"""Registered routing policies: one file each, named after the policy."""
