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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.arguments import with_checked_arguments
from moesim.base.extensions import choose
from moesim.base.links import check_links
from moesim.base.version import __version__

if TYPE_CHECKING:
    from moesim.advice.advise import advise
    from moesim.advice.answer import Advice
    from moesim.advice.plan.memory import Job
    from moesim.hwprofiles.profile import (
        HardwareProfile,
        list_profiles,
        load_profile,
        save_profile,
    )
    from moesim.policies.registry import describe as list_policies
    from moesim.policies.registry import register
    from moesim.questions.answer import answer
    from moesim.questions.compare import Comparison, compare
    from moesim.questions.gap import gap
    from moesim.questions.hit_rates import hit_rates
    from moesim.questions.quality import quality
    from moesim.questions.search import search
    from moesim.questions.sensitivity import sensitivity
    from moesim.reporting.answers import Answer
    from moesim.reporting.figures import Figure, line_figure, style
    from moesim.runs.config import MeasuredConfig, MemoryOptions, RunConfig
    from moesim.runs.config_file import load_config
    from moesim.runs.replay import replay, replay_cache
    from moesim.runs.result import Run
    from moesim.runs.sweeps.ranking import ranking
    from moesim.runs.sweeps.rows import query, results
    from moesim.runs.sweeps.sweep import sweep
    from moesim.runtime.models.local_model import load_model
    from moesim.runtime.record.record import record
    from moesim.traces.exporters import export_trace
    from moesim.traces.format.reader import Trace, open_trace
    from moesim.traces.importers import import_trace
    from moesim.traces.synthetic.generate import synth
    from moesim.traces.synthetic.predict import predict
    from moesim.traces.timeline.perfetto import write_perfetto
    from moesim.traces.timeline.spans import Timeline

choose()

__all__ = [
    "Advice",
    "Answer",
    "Comparison",
    "Figure",
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
    "answer",
    "compare",
    "export_trace",
    "gap",
    "hit_rates",
    "import_trace",
    "line_figure",
    "list_policies",
    "list_profiles",
    "load_config",
    "load_model",
    "load_profile",
    "open_trace",
    "predict",
    "quality",
    "query",
    "ranking",
    "record",
    "register",
    "replay",
    "replay_cache",
    "results",
    "save_profile",
    "search",
    "sensitivity",
    "style",
    "sweep",
    "synth",
    "write_perfetto",
]

# A module that moves is one line here.
_MODULES = {
    "moesim.advice.advise": ("advise",),
    "moesim.advice.answer": ("Advice",),
    "moesim.advice.plan.memory": ("Job",),
    "moesim.hwprofiles.profile": (
        "HardwareProfile",
        "list_profiles",
        "load_profile",
        "save_profile",
    ),
    "moesim.policies.registry": ("list_policies", "register"),
    "moesim.questions.compare": ("Comparison", "compare"),
    "moesim.questions.gap": ("gap",),
    "moesim.questions.hit_rates": ("hit_rates",),
    "moesim.questions.quality": ("quality",),
    "moesim.questions.search": ("search",),
    "moesim.questions.sensitivity": ("sensitivity",),
    "moesim.questions.answer": ("answer",),
    "moesim.reporting.answers": ("Answer",),
    "moesim.reporting.figures": ("Figure", "line_figure", "style"),
    "moesim.runs.config": ("MeasuredConfig", "MemoryOptions", "RunConfig"),
    "moesim.runs.config_file": ("load_config",),
    "moesim.runs.replay": ("replay", "replay_cache"),
    "moesim.runs.result": ("Run",),
    "moesim.runs.sweeps.ranking": ("ranking",),
    "moesim.runs.sweeps.rows": ("query", "results"),
    "moesim.runs.sweeps.sweep": ("sweep",),
    "moesim.runtime.models.local_model": ("load_model",),
    "moesim.runtime.record.record": ("record",),
    "moesim.traces.exporters": ("export_trace",),
    "moesim.traces.format.reader": ("Trace", "open_trace"),
    "moesim.traces.importers": ("import_trace",),
    "moesim.traces.synthetic.generate": ("synth",),
    "moesim.traces.synthetic.predict": ("predict",),
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
    check_links(Path(__file__).parent)
    # Not kept here: importing twice costs nothing, and tests replace functions there.
    module = importlib.import_module(_MODULE_OF[name])
    return with_checked_arguments(getattr(module, _NAME_THERE.get(name, name)))


def __dir__() -> list[str]:
    """Names that notebooks complete."""
    return sorted(__all__)
