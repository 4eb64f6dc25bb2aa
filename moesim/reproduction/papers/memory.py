"""GPU memory that a run takes, keys and values included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.hwprofiles.dense_costs import DenseSizes
from moesim.hwprofiles.profile import load_profile
from moesim.runs.config import RunConfig

if TYPE_CHECKING:
    from moesim.reproduction.papers.runs import RunSpec


def gpu_bytes(run: RunSpec, *, context_tokens: int) -> float:
    """Return the bytes of the expert cache, the staging slots, the dense weights, and
    the keys and values of all sequences at the end of a context.

    Raises:
        PolicyError: impossible sizes.
    """
    options = dict(run.options)
    batch = options.pop("batch", 1)
    config = RunConfig.of(None, run.policy, **options)
    shape = run.workload.shape
    plan = config.memory.plan(shape, load_profile(run.machine), config.system)
    layers = shape.layers + len(shape.dense_layers)
    keys_and_values = DenseSizes.of(shape).kv_bytes * layers * batch * context_tokens
    staging_bytes = plan.staging * shape.max_expert_bytes
    return plan.gpu.total_bytes + staging_bytes + shape.other_bytes + keys_and_values
