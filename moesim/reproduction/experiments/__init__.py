"""Published figures that need only routing, computed on traces at hand: one small
function per experiment.

An experiment says which published records it stands beside, how their settings name a
row, what it needs and where it departs from its source. `moesim.reproduction.published`
runs them.
"""

from moesim.reproduction.experiments.assignment import EXPERIMENTS as ASSIGNMENT
from moesim.reproduction.experiments.base import Experiment
from moesim.reproduction.experiments.cache import EXPERIMENTS as CACHE
from moesim.reproduction.experiments.learned import EXPERIMENTS as LEARNED
from moesim.reproduction.experiments.prediction import EXPERIMENTS as PREDICTION
from moesim.reproduction.experiments.routing import EXPERIMENTS as ROUTING
from moesim.reproduction.experiments.smoe import EXPERIMENTS as SMOE

__all__ = ["EXPERIMENTS", "Experiment"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for room in (CACHE, LEARNED, SMOE, ASSIGNMENT, PREDICTION, ROUTING)
    for experiment in room
}
"""Name -> experiment, in the order in which they are listed."""
