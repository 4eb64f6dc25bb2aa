"""Errors of real runs, as one line: place, expected, found, way out."""

from __future__ import annotations


class StoreError(ValueError):
    """An expert store, or the checkpoint it is built from, cannot be trusted or cannot
    be used.
    """


# No "Error" in the name: the machine is at fault, not the input.
class RuntimeFault(RuntimeError):  # noqa: N818 - see above
    """The machine did not give what a run needs: memory, page-locking, or a disk that
    answers.
    """
