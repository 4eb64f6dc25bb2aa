"""Errors that a user can do something about, each one line: file, key, expected, found,
way out.
"""

from __future__ import annotations


class ProfileError(ValueError):
    """A hardware profile is missing, malformed, or lacks a cost that is needed now."""
