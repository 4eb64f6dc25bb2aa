"""Which experts kt-kernel keeps on the card, by its placement strategies.

Source: `kt_ep_wrapper.py` of kvcache-ai/sglang: a number of experts per layer becomes a
number for the whole model, which each strategy shares out in its way.
"""

from __future__ import annotations

import numpy as np

FREQUENCY = "frequency"
UNIFORM = "uniform"
FRONT_LOADING = "front-loading"
STRATEGIES = (FREQUENCY, UNIFORM, FRONT_LOADING)


def expert_mask(strategy: str, per_layer: int, counts: np.ndarray) -> np.ndarray:
    """Return the experts that lie on the card, bool [L, E].

    Args:
        strategy: one of `STRATEGIES`.
        per_layer: ``--kt-num-gpu-experts``.
        counts: uses of each expert, int [L, E]; only ``frequency`` looks at them.
    """
    layers, experts = counts.shape
    total = per_layer * layers
    mask = np.zeros(counts.size, np.bool_)
    if strategy == FREQUENCY:
        # The most used ones of the whole model, not of each layer.
        busiest = np.argsort(-counts.ravel(), kind="stable")
        mask[busiest[:total]] = True
    elif strategy == FRONT_LOADING:
        mask[:total] = True
    else:
        mask = np.tile(np.arange(experts) < per_layer, layers)
    return mask.reshape(layers, experts)
