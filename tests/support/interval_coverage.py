"""Draws with a known mean, and whether intervals cover it as often as they say."""

import numpy as np

WORKLOADS = {
    "alike": lambda rng, shape: rng.normal(1.0, 0.1, shape),
    "skewed": lambda rng, shape: rng.lognormal(-0.125, 0.5, shape),
    "very skewed": lambda rng, shape: rng.exponential(1.0, shape),
}
"""Positive numbers with the mean 1, by how they scatter."""


def is_share(count, total, low, high):
    """Whether a count is compatible with a share between `low` and `high`: within three
    standard errors of it.
    """
    share = count / total
    error = 3 * np.sqrt(max(share * (1 - share), 0.01) / total)
    return low - error <= share <= high + error
