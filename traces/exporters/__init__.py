"""Exporters write traces for other tools: one file per layout, found by scanning this
folder.

An exporter is a module with ``export(trace, out, progress) -> int``, the number of
records written; its first line says what the file is. ``SUFFIX`` is the ending people
expect. Where it has ``OPTIONS``, `export` takes them as keywords, and ``tell``, which
it calls with what deserves a line.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moesim.traces.format.reader import Trace


def exporters() -> dict[str, Any]:
    """Return name -> module of every exporter in this folder, sorted by name.

    Names are hyphenated, as those of policies are.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {
        name.replace("_", "-"): importlib.import_module(f"{__name__}.{name}")
        for name in names
    }


def export_trace(
    trace: Trace,
    out: Path | str,
    layout: str,
    *,
    progress: Callable[[int], None] | None = None,
    options: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Write a trace in another layout; the file appears only when it is whole.

    Args:
        trace: an opened trace.
        out: the file to make.
        layout: a name from `exporters`.
        progress: called with the number of records written so far.
        options: what the layout asks for: ``{"cache_size": "9GiB"}``.
        tell: called with what the exporter has to say.

    Returns:
        Records written.

    Raises:
        TraceError: an unknown layout or option, a damaged trace, or sizes that the
            layout cannot hold.
    """
    # A misspelt layout is told before the trace is read.
    known = exporters()
    if layout not in known:
        raise TraceError(
            f"export layout {layout!r}: unknown; known: {', '.join(known)}"
        )

    given = dict(options or {})
    offered = getattr(known[layout], "OPTIONS", ())
    for name in given:
        if name not in offered:
            raise TraceError(
                f"--{name.replace('_', '-')}: layout {layout} takes no such option"
            )
    # Exporters need not ask whether anybody watches.
    report = progress or (lambda _: None)
    remarks = {"tell": tell or (lambda _: None)} if offered else {}
    return int(known[layout].export(trace, Path(out), report, **given, **remarks))
