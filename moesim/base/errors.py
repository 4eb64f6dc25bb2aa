"""Errors that a user can do something about, as one line: file, place, expected, found,
way out.
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


class AdviceError(ValueError):
    """A model file, machine, measurement or job that cannot be advised on."""


class StoreError(ValueError):
    """An expert store, or the checkpoint it is built from, cannot be trusted or cannot
    be used.
    """


# No "Error" in the name: the machine is at fault, not the input.
class RuntimeFault(RuntimeError):  # noqa: N818 - see above
    """The machine did not give what a run needs: memory, page-locking, or a disk that
    answers.
    """
