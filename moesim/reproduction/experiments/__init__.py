"""Published figures that need only routing, computed on any trace: one small function
per experiment.

An experiment says which published records it stands beside, how their settings name a
row, what it needs, and where it departs from its source.
`moesim.reproduction.published` runs them.
"""

from moesim.reproduction.experiments.assignment import EXPERIMENTS as ASSIGNMENT
from moesim.reproduction.experiments.base import Experiment
from moesim.reproduction.experiments.evictions import EXPERIMENTS as EVICTIONS
from moesim.reproduction.experiments.hit_rates import EXPERIMENTS as HIT_RATES
from moesim.reproduction.experiments.learned import EXPERIMENTS as LEARNED
from moesim.reproduction.experiments.prediction import EXPERIMENTS as PREDICTION
from moesim.reproduction.experiments.routing import EXPERIMENTS as ROUTING
from moesim.reproduction.experiments.smoe import EXPERIMENTS as SMOE
from moesim.reproduction.experiments.window_cache import EXPERIMENTS as WINDOW_CACHE

__all__ = ["EXPERIMENTS", "Experiment"]

# What caches do comes first: those experiments need nothing but routing.
_GROUPS = (
    HIT_RATES,
    EVICTIONS,
    WINDOW_CACHE,
    LEARNED,
    SMOE,
    ASSIGNMENT,
    PREDICTION,
    ROUTING,
)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for group in _GROUPS for experiment in group
}
"""Name -> experiment, in the order in which they are listed."""
