"""What a user can do something about, as one line: file, place, expected, found, way
out.
"""

from __future__ import annotations


class TraceError(ValueError):
    """A trace, or a foreign file that should become one, cannot be trusted."""


class MissingColumnError(TraceError):
    """A trace lacks an optional column that somebody reads.

    Attributes:
        column: its name.
    """

    def __init__(self, message: str, column: str) -> None:
        # Both are arguments, so that processes can send it to each other.
        super().__init__(message, column)
        self.column = column

    def __str__(self) -> str:
        """The message alone."""
        return str(self.args[0])
