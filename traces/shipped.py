"""Traces that ship with moesim, found by name.

Both were recorded from the small model in ``runtime/data/tiny``, on texts that it was
not trained on; the two parts share no text.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

SHIPPED = {
    "tiny": "tiny_evaluation.parquet",
    "tiny-calibration": "tiny_calibration.parquet",
}
"""Name -> file in ``traces/data``."""


def resolve_trace(path: Path | str) -> Path:
    """The file of that path; if there is none, the shipped trace of that name.

    A path that is neither comes back as it is, so that opening it names it.
    """
    path = Path(path)
    name = str(path)
    # A file of the user's own comes first. A folder of that name is no trace.
    if path.is_file() or name not in SHIPPED:
        return path
    return Path(str(resources.files("moesim.traces") / "data" / SHIPPED[name]))
