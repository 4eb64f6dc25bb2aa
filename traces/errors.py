"""What a user can do something about, as one line: file, place, expected, found, way
out.
"""

from __future__ import annotations


class TraceError(ValueError):
    """A trace, or a foreign file that should become one, cannot be trusted."""
