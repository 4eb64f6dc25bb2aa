"""Published figures that need only routing, computed on traces at hand: one small function per experiment.

An experiment says which published records it stands beside, how their settings name a row, what it needs and
where it departs from its source. `moesim.reproduce` runs them.
"""

from moesim.experiments import assignment, cache, prediction, routing
from moesim.experiments.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (cache, assignment, prediction, routing)
    for experiment in module.EXPERIMENTS
}
"""Name -> experiment, in the order in which they are listed."""
