"""Published figures that need only routing, computed on traces at hand: one small function per experiment.

An experiment says which published records it stands beside, how their settings name a row, what it needs and
where it departs from its source. `moesim.reproduce` runs them.
"""

from moesim.experiments.assignment import EXPERIMENTS as ASSIGNMENT
from moesim.experiments.base import Experiment
from moesim.experiments.cache import EXPERIMENTS as CACHE
from moesim.experiments.learned import EXPERIMENTS as LEARNED
from moesim.experiments.prediction import EXPERIMENTS as PREDICTION
from moesim.experiments.routing import EXPERIMENTS as ROUTING
from moesim.experiments.smoe import EXPERIMENTS as SMOE

__all__ = ["EXPERIMENTS", "Experiment"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for room in (CACHE, LEARNED, SMOE, ASSIGNMENT, PREDICTION, ROUTING)
    for experiment in room
}
"""Name -> experiment, in the order in which they are listed."""
