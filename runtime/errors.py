"""What can go wrong in the real world, as one line: place, expected, found, way out."""

from __future__ import annotations


class StoreError(ValueError):
    """An expert store, or the checkpoint it is built from, cannot be trusted or cannot
    be used.
    """


class RuntimeFault(RuntimeError):  # noqa: N818 - the machine's fault, not a mistake in the input
    """The machine did not give what a run needs: memory, page-locking, or a disk that
    answers.
    """
