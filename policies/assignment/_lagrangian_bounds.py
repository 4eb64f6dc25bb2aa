"""Lagrangian lower bounds on the makespan of a layer step.

Give a second on the CPU, on a GPU and on a link fixed prices (Lagrange multipliers)
that sum to one. A schedule's makespan is then at least the priced cost of its work, and
that is at least the sum of every expert's cost on its cheapest lane. Good prices are
those that make this bound large: there, the lanes are balanced.

A active experts, G GPUs, R = 1 + 2 G priced resources (CPU; of each GPU: compute,
link), M rows of prices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types as nb

from moesim.policies.compilation import called
from moesim.traces.compilation import compiled

# Shares of link and compute in a GPU's price that are tried.
_MIXES = 5

# Halvings of the interval in which two lanes' balance is sought.
_BISECTIONS = 24


class Layer(NamedTuple):
    """A layer step as the solver sees it: experts are launched in `order`; links and
    arrivals keep it.

    One more array in here makes the dynamic program a tenth slower (measured).

    Attributes:
        cpu_s: float64 [A] on the CPU.
        gpu_s: float64 [G, A] on each GPU once there.
        copy_s: float64 [G, A] on the link; 0 if no copy is needed.
        landing_s: float64 [G, A] landing of a copy in flight; 0 if there is none.
        link_s: float64 [G] from when each link is free.
        first_s: extra seconds of the first CPU expert.
        order: int64 [A].
    """

    cpu_s: np.ndarray
    gpu_s: np.ndarray
    copy_s: np.ndarray
    landing_s: np.ndarray
    link_s: np.ndarray
    first_s: float
    order: np.ndarray


# Field by field as in `Layer`: numba matches them by position.
LAYER = nb.NamedTuple(
    (
        nb.float64[::1],
        nb.float64[:, ::1],
        nb.float64[:, ::1],
        nb.float64[:, ::1],
        nb.float64[::1],
        nb.float64,
        nb.int64[::1],
    ),
    Layer,
)
"""Numba's type of a `Layer`."""


@called
def _loads(
    layer: Layer,
    share: np.ndarray,
    mix: float,
    load: np.ndarray,
) -> float:
    """Fill `load`, float64 [1 + G], with each expert on its cheapest lane; return what
    they cost together.

    A GPU's second is `mix` link and the rest compute; a second on lane d costs
    ``share[d]``.
    """
    total = 0.0
    load[:] = 0.0
    for i in range(len(layer.cpu_s)):
        lane = 0
        added = layer.cpu_s[i]
        best = share[0] * added
        for g in range(len(layer.gpu_s)):
            seconds = (1.0 - mix) * layer.gpu_s[g, i] + mix * layer.copy_s[g, i]
            if share[g + 1] * seconds < best:
                best = share[g + 1] * seconds
                lane = g + 1
                added = seconds
        load[lane] += added
        total += best
    return total


@called
def _balance(layer: Layer, mix: float) -> np.ndarray:
    """Price of each lane, float64 [1 + G], sum 1: between each pair of lanes, bisect
    until their loads balance.

    With one GPU that is the optimal dual solution of the mix.
    """
    lanes = len(layer.gpu_s) + 1
    share = np.full(lanes, 1.0 / lanes)
    load = np.empty(lanes)

    # One pair settles at once; with several, each bisection disturbs the others, so
    # the pairs are visited three times.
    for _ in range(1 if lanes == 2 else 3):
        for a in range(lanes - 1):
            for b in range(a + 1, lanes):
                both = share[a] + share[b]
                low = 0.0
                high = 1.0
                for _ in range(_BISECTIONS):
                    middle = 0.5 * (low + high)
                    share[a] = both * middle
                    share[b] = both - share[a]
                    _loads(layer, share, mix, load)
                    if load[a] > load[b]:
                        low = middle
                    else:
                        high = middle
    return share


@compiled(nb.Tuple((nb.float64[:, ::1], nb.float64[::1]))(LAYER))
def lagrangian_prices(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Price the resources so that the priced work bounds the makespan from below, for
    several mixes.

    Returns:
        prices float64 [M, R], each row summing to 1; and by how much an expert's two
        cheapest lanes differ in the first row's prices, float64 [A].
    """
    gpus = len(layer.gpu_s)
    active = len(layer.cpu_s)
    # Without copies the link's share of a price is lost, so only mix 0 can be good.
    mixes = _MIXES if layer.copy_s.max() > 0.0 else 1
    price = np.zeros((mixes, 1 + 2 * gpus))
    for m in range(mixes):
        mix = m / (_MIXES - 1)
        share = _balance(layer, mix)
        price[m, 0] = share[0]
        for g in range(gpus):
            price[m, 1 + 2 * g] = share[g + 1] * (1.0 - mix)
            price[m, 2 + 2 * g] = share[g + 1] * mix

    regret = np.empty(active)
    for i in range(active):
        best = price[0, 0] * layer.cpu_s[i]
        second = np.inf
        for g in range(gpus):
            cost = price[0, 1 + 2 * g] * layer.gpu_s[g, i]
            second = min(second, max(best, cost))
            best = min(best, cost)
        regret[i] = second - best
    return price, regret


@compiled(nb.float64[:, ::1](LAYER, nb.float64[:, ::1]))
def priced_remainder(
    layer: Layer,
    price: np.ndarray,
) -> np.ndarray:
    """Priced cost of the experts ``order[n:]``, each on its cheapest lane: float64 [M,
    A + 1].
    """
    gpus = len(layer.gpu_s)
    active = len(layer.cpu_s)
    remainder = np.zeros((len(price), active + 1))
    for m in range(len(price)):
        # From the last expert on: each sum extends the one behind it.
        for n in range(active - 1, -1, -1):
            i = layer.order[n]
            least = price[m, 0] * layer.cpu_s[i]
            for g in range(gpus):
                compute = price[m, 1 + 2 * g] * layer.gpu_s[g, i]
                copy = price[m, 2 + 2 * g] * layer.copy_s[g, i]
                least = min(least, compute + copy)
            remainder[m, n] = remainder[m, n + 1] + least
    return remainder
