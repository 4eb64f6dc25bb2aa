"""moesim: which expert should be where, when, computed by whom.

`import moesim` gives notebooks the functions that the command line calls. Each is
imported when it is first used, so the import itself costs nothing and never loads
torch::

    import moesim
    run = moesim.replay("trace.parquet", "greedy", cache="lru", hw="rtx3090-epyc7532")
    run.metrics["decode_tokens_per_s"]
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.extensions import check_links, choose
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
    from moesim.reporting.figures import Figure, style
    from moesim.runs.config import MeasuredConfig, RunConfig
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

# The imports above are for type checkers; each is made when its name is first used.
_PLACES = {
    alias.asname or alias.name: (f"{statement.module}", alias.name)
    for statement in ast.walk(ast.parse(Path(__file__).read_bytes()))
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'moesim' has no attribute {name!r}")
    check_links(Path(__file__).parent)
    # Not kept here: importing twice costs nothing, and tests replace functions there.
    module, name_there = _PLACES[name]
    return getattr(importlib.import_module(module), name_there)


def __dir__() -> list[str]:
    """Names that notebooks complete."""
    return sorted(__all__)
