"""Lines that many commands print when they are done."""

import sys
from collections.abc import Iterable
from pathlib import Path


def print_written(places: Iterable[Path | None]) -> None:
    """Name the files and folders that were written; None was not asked for."""
    for place in places:
        # Callers list all that could be written.
        if place is not None:
            print(f"wrote {place}")


def print_notes(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, so that they are no results."""
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)
