"""moesim: which expert should be where, when, computed by whom.

`import moesim` gives notebooks the functions that the command line calls. Each is imported when it is first
touched, so the import itself costs nothing and never loads torch::

    import moesim
    run = moesim.replay("trace.parquet", "greedy", cache="lru", hw="rtx3090-epyc7532")
    run.metrics["decode_tokens_per_s"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwprofiles.profile import HardwareProfile, list_profiles, load_profile, save_profile
    from moesim.api import MemoryOptions, Run, replay, replay_cache
    from moesim.comparison import compare, sweep
    from moesim.hits import hit_rates, hits_figure
    from moesim.pictures import comparison_figure, placement_figure, step_figure
    from moesim.report import comparison_text, run_text
    from moesim.sweep_report import sweep_figure, sweep_text
    from policies.registry import register
    from traces.perfetto import write_perfetto
    from traces.reader import Trace, open_trace
    from traces.timeline import Timeline

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
    "moesim.api": ("MemoryOptions", "Run", "replay", "replay_cache"),
    "moesim.comparison": ("compare", "sweep"),
    "moesim.hits": ("hit_rates", "hits_figure"),
    "moesim.pictures": ("comparison_figure", "placement_figure", "step_figure"),
    "moesim.report": ("comparison_text", "run_text"),
    "moesim.sweep_report": ("sweep_figure", "sweep_text"),
    "hwprofiles.profile": ("HardwareProfile", "list_profiles", "load_profile", "save_profile"),
    "policies.registry": ("register",),
    "traces.perfetto": ("write_perfetto",),
    "traces.reader": ("Trace", "open_trace"),
    "traces.timeline": ("Timeline",),
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
