"""moesim: which expert should be where, when, computed by whom.

`import moesim` gives notebooks the functions that the command line calls. Each is
imported when it is first touched, so the import itself costs nothing and never loads
torch::

    import moesim
    run = moesim.replay("trace.parquet", "greedy", cache="lru", hw="rtx3090-epyc7532")
    run.metrics["decode_tokens_per_s"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesim.analysis.hit_rates import hit_rates, hits_figure
    from moesim.hwprofiles.profile import (
        HardwareProfile,
        list_profiles,
        load_profile,
        save_profile,
    )
    from moesim.policies.registry import register
    from moesim.reporting.figures import (
        comparison_figure,
        placement_figure,
        step_figure,
    )
    from moesim.reporting.sweep_page import sweep_figure, sweep_text
    from moesim.reporting.text import comparison_text, run_text
    from moesim.runs.cache_replay import replay_cache
    from moesim.runs.memory import MemoryOptions
    from moesim.runs.replay import replay
    from moesim.runs.result import Run
    from moesim.runs.sweep import compare, sweep
    from moesim.traces.format.reader import Trace, open_trace
    from moesim.traces.timeline.perfetto import write_perfetto
    from moesim.traces.timeline.spans import Timeline

__version__ = "0.1.0"

__all__ = [
    "HardwareProfile",
    "MemoryOptions",
    "Run",
    "Timeline",
    "Trace",
    "compare",
    "comparison_figure",
    "comparison_text",
    "hit_rates",
    "hits_figure",
    "list_profiles",
    "load_profile",
    "open_trace",
    "placement_figure",
    "register",
    "replay",
    "replay_cache",
    "run_text",
    "save_profile",
    "step_figure",
    "sweep",
    "sweep_figure",
    "sweep_text",
    "write_perfetto",
]

_HOMES = {
    "moesim.runs.memory": ("MemoryOptions",),
    "moesim.runs.cache_replay": ("replay_cache",),
    "moesim.runs.replay": ("replay",),
    "moesim.runs.result": ("Run",),
    "moesim.runs.sweep": ("compare", "sweep"),
    "moesim.analysis.hit_rates": ("hit_rates", "hits_figure"),
    "moesim.reporting.figures": (
        "comparison_figure",
        "placement_figure",
        "step_figure",
    ),
    "moesim.reporting.text": ("comparison_text", "run_text"),
    "moesim.reporting.sweep_page": ("sweep_figure", "sweep_text"),
    "moesim.hwprofiles.profile": (
        "HardwareProfile",
        "list_profiles",
        "load_profile",
        "save_profile",
    ),
    "moesim.policies.registry": ("register",),
    "moesim.traces.timeline.perfetto": ("write_perfetto",),
    "moesim.traces.format.reader": ("Trace", "open_trace"),
    "moesim.traces.timeline.spans": ("Timeline",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'moesim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Names that notebooks complete."""
    return sorted([*__all__, "__version__"])
