"""moesim: which expert should be where, when, computed by whom.

`import moesim` gives notebooks the functions that the command line calls. Each is
imported when it is first used, so the import itself costs nothing and never loads
torch::

    import moesim
    run = moesim.replay("trace.parquet", "greedy", cache="lru", hw="rtx3090-epyc7532")
    run.metrics["decode_tokens_per_s"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moesim.version import __version__

if TYPE_CHECKING:
    from moesim.advice.advise import Advice, advise
    from moesim.advice.plan.candidates import Job
    from moesim.analysis.gap import gap
    from moesim.analysis.gap_text import gap_text
    from moesim.analysis.hit_rates import hit_rates, hits_figure
    from moesim.analysis.quality import quality
    from moesim.analysis.sensitivity import sensitivity
    from moesim.hwprofiles.profile import (
        HardwareProfile,
        list_profiles,
        load_profile,
        save_profile,
    )
    from moesim.policies.registry import describe as list_policies
    from moesim.policies.registry import register
    from moesim.reporting.cells_figure import cells_figure
    from moesim.reporting.cells_text import cells_text
    from moesim.reporting.figures import (
        comparison_figure,
        placement_figure,
        step_figure,
    )
    from moesim.reporting.sweeps.figure import sweep_figure
    from moesim.reporting.sweeps.text import sweep_text
    from moesim.reporting.text import comparison_text, run_text
    from moesim.runs.cache_replay import replay_cache
    from moesim.runs.config import MeasuredConfig, RunConfig
    from moesim.runs.config_file import load_config
    from moesim.runs.memory import MemoryOptions
    from moesim.runs.replay import replay
    from moesim.runs.result import Run
    from moesim.sweeps.comparison import compare, compare_cells
    from moesim.sweeps.ranking import ranking
    from moesim.sweeps.search import search
    from moesim.sweeps.store import results
    from moesim.sweeps.sweep import sweep
    from moesim.traces.exporters import export_trace
    from moesim.traces.format.reader import Trace, open_trace
    from moesim.traces.importers import import_trace
    from moesim.traces.synthetic.predict import predict
    from moesim.traces.synthetic.synth import synth
    from moesim.traces.timeline.perfetto import write_perfetto
    from moesim.traces.timeline.spans import Timeline

__all__ = [
    "Advice",
    "HardwareProfile",
    "Job",
    "MeasuredConfig",
    "MemoryOptions",
    "Run",
    "RunConfig",
    "Timeline",
    "Trace",
    "__version__",
    "advise",
    "cells_figure",
    "cells_text",
    "compare",
    "compare_cells",
    "comparison_figure",
    "comparison_text",
    "export_trace",
    "gap",
    "gap_text",
    "hit_rates",
    "hits_figure",
    "import_trace",
    "list_policies",
    "list_profiles",
    "load_config",
    "load_profile",
    "open_trace",
    "placement_figure",
    "predict",
    "quality",
    "ranking",
    "register",
    "replay",
    "replay_cache",
    "results",
    "run_text",
    "save_profile",
    "search",
    "sensitivity",
    "step_figure",
    "sweep",
    "sweep_figure",
    "sweep_text",
    "synth",
    "write_perfetto",
]

# A module that moves is one line here.
_MODULES = {
    "moesim.advice.advise": ("Advice", "advise"),
    "moesim.advice.plan.candidates": ("Job",),
    "moesim.analysis.gap": ("gap",),
    "moesim.analysis.gap_text": ("gap_text",),
    "moesim.analysis.hit_rates": ("hit_rates", "hits_figure"),
    "moesim.analysis.quality": ("quality",),
    "moesim.analysis.sensitivity": ("sensitivity",),
    "moesim.hwprofiles.profile": (
        "HardwareProfile",
        "list_profiles",
        "load_profile",
        "save_profile",
    ),
    "moesim.policies.registry": ("list_policies", "register"),
    "moesim.reporting.figures": (
        "comparison_figure",
        "placement_figure",
        "step_figure",
    ),
    "moesim.reporting.cells_figure": ("cells_figure",),
    "moesim.reporting.cells_text": ("cells_text",),
    "moesim.reporting.sweeps.figure": ("sweep_figure",),
    "moesim.reporting.sweeps.text": ("sweep_text",),
    "moesim.reporting.text": ("comparison_text", "run_text"),
    "moesim.runs.cache_replay": ("replay_cache",),
    "moesim.runs.config": ("MeasuredConfig", "RunConfig"),
    "moesim.runs.config_file": ("load_config",),
    "moesim.runs.memory": ("MemoryOptions",),
    "moesim.runs.replay": ("replay",),
    "moesim.runs.result": ("Run",),
    "moesim.sweeps.comparison": ("compare", "compare_cells"),
    "moesim.sweeps.ranking": ("ranking",),
    "moesim.sweeps.search": ("search",),
    "moesim.sweeps.store": ("results",),
    "moesim.sweeps.sweep": ("sweep",),
    "moesim.traces.exporters": ("export_trace",),
    "moesim.traces.format.reader": ("Trace", "open_trace"),
    "moesim.traces.importers": ("import_trace",),
    "moesim.traces.synthetic.predict": ("predict",),
    "moesim.traces.synthetic.synth": ("synth",),
    "moesim.traces.timeline.perfetto": ("write_perfetto",),
    "moesim.traces.timeline.spans": ("Timeline",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# Here a name must say of what it is; in its module that is clear.
_NAME_THERE = {"list_policies": "describe"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'moesim' has no attribute {name!r}")
    # Not kept here: importing twice costs nothing, and tests replace functions there.
    module = importlib.import_module(_MODULE_OF[name])
    return getattr(module, _NAME_THERE.get(name, name))


def __dir__() -> list[str]:
    """Names that notebooks complete."""
    return sorted(__all__)
