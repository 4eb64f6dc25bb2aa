"""Traces that ship with moesim, found by name.

``gpt-oss-20b-like`` has the size of a model that people run: 12 sequences, drawn from
statistics of 23 real ones, with ``moesim trace synth --like gpt-oss-20b --quant mxfp4
--tokens 1536 --prompt-tokens 64 --new-tokens 64``, before drawn sequences began alike.
The others were recorded from the small model in ``runtime/data/tiny``, on texts that it
was not trained on; the two share no text.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from moesim.base.errors import TraceError

SHIPPED = {
    "gpt-oss-20b-like": "gpt_oss_20b_like.parquet",
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


def find_trace(path: Path | str) -> Path:
    """The file of a trace, by path or name.

    Raises:
        TraceError: nothing is there.
    """
    place = resolve_trace(path)
    if not place.exists():
        raise no_trace(place)
    return place


def no_trace(path: Path) -> TraceError:
    """Return the message for a trace that is not there."""
    # It reads a table, which is needed here alone.
    from moesim.base.text import did_you_mean  # noqa: PLC0415
    from moesim.traces.models import known_models  # noqa: PLC0415

    # The name of a model is easily taken for a trace of it.
    if str(path) in known_models():
        return TraceError(
            f"{path}: a model, and no trace; `moesim trace synth {path}.parquet"
            f" --shape {path}` draws one, `moesim record` records one"
        )
    hint = did_you_mean(str(path), SHIPPED)
    return TraceError(
        f"{path}: no such file{hint}; `moesim record` or `moesim trace import` makes a"
        f" trace; {', '.join(SHIPPED)} ship with moesim"
    )
