"""Training samples of the cache network: what it sees, and what it should answer.

The teacher is hindsight. While a trace passes, each layer step gives one sample: the
`History` of every expert as the policy would see it, and what came afterwards.

S layer steps of one layer, L MoE layers, N experts per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from moesim.policies.cache._learned_network import History
from moesim.policies.cache.belady import Belady
from moesim.policies.cache_replay import replay
from moesim.policies.planner.residency import CacheSize
from moesim.traces.errors import TraceError
from moesim.traces.format.future import RecordedFuture

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moesim.policies.base import LayerWork
    from moesim.runtime.train.cache_recipe import Recipe
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

LEAST_STEPS: Final = 20


class Samples(NamedTuple):
    """What there is to learn, layer steps first.

    Attributes:
        features: float32 [S, L, 2N].
        target: float32 [S, L, N].
        counts: bool [S, L, N], whether an entry counts at all.
        at_least: bool [S, L, N], whether the target is only a lower bound, because the
            trace ended before the next use.
    """

    features: np.ndarray
    target: np.ndarray
    counts: np.ndarray
    at_least: np.ndarray

    def part(self, start: int, stop: int) -> Self:
        """Samples of the steps from `start` to before `stop`."""
        arrays = {name: array[start:stop] for name, array in self._asdict().items()}
        return self._replace(**arrays)


def observe(
    steps: Iterable[RoutedStep],
    shape: ModelShape,
    recipe: Recipe,
    slots: int | None = None,
) -> Samples:
    """Walk a trace once for features and once more, if need be, for the teacher's
    decisions.

    Raises:
        TraceError: too few steps, or no miss to learn from.
    """
    history = History(shape.layers, shape.experts)
    features: list[np.ndarray] = []
    active: list[np.ndarray] = []
    for step in steps:
        used = np.zeros((shape.layers, shape.experts), np.bool_)
        for routed in step.layers:
            history.note(routed.layer, routed.experts)
            used[routed.layer, routed.experts] = True
        # After the step is noted: the policy decides when it has seen its accesses.
        layers = [history.features(layer) for layer in range(shape.layers)]
        features.append(np.stack(layers))
        active.append(used)

    count = len(active)
    if count < LEAST_STEPS:
        raise TraceError(
            f"training part: expected at least {LEAST_STEPS} forward passes, found"
            f" {count}"
        )

    if recipe.labels == "masked":
        assert slots is not None, "masked labels are those of a cache of some size"
        target, counts = belady_labels(steps, shape, slots, count)
        at_least = np.zeros_like(counts)
    else:
        horizon = recipe.horizon_for(shape.experts, count)
        target, at_least = distance_labels(np.stack(active), horizon)
        counts = np.ones_like(at_least)
    return Samples(np.stack(features), target, counts, at_least)


def distance_labels(active: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Scaled steps until each expert's next use, strictly later, and whether they are
    only lower bounds.

    An expert that the part shows no more comes back behind its end or never, so its
    distance is at least that to the end. CECAR counts it as never; on the few hundred
    steps of a short trace that would teach that all late steps are last ones.

    Args:
        active: bool [S, ...], the experts used in each step.
        horizon: K.

    Returns:
        float32 and bool, both shaped as `active`.
    """
    steps = len(active)
    distance = np.empty(active.shape, np.float32)
    until_next = np.full(active.shape[1:], np.inf, np.float32)
    # Backwards, because the next use lies in the future.
    for step in range(steps - 1, -1, -1):
        distance[step] = until_next
        until_next += 1.0
        until_next[active[step]] = 1.0

    until_end = np.arange(steps, 0, -1, dtype=np.float32)
    until_end = until_end.reshape(-1, *[1] * (active.ndim - 1))
    unseen = np.isinf(distance)
    return scaled(np.where(unseen, until_end, distance), horizon), unseen


def scaled(distance: np.ndarray, horizon: int) -> np.ndarray:
    """``(clip(d, 1, K) - 1) / (K - 1)``, float32: 0 is the next step, 1 is K steps
    ahead or never.

    Source: algorithms §5.4, target (ii).
    """
    clipped = np.clip(distance, 1.0, horizon)
    return ((clipped - 1.0) / (horizon - 1)).astype(np.float32)


def belady_labels(
    steps: Iterable[RoutedStep], shape: ModelShape, slots: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mark the victims of Belady, and the candidates it chose them from, in a cache of
    `slots` per layer where every miss enters.

    Returns:
        float32 [S, L, N], 1 for victims; bool [S, L, N], true for residents that could
        have been.

    Raises:
        TraceError: the cache never evicts, so there is nothing to learn.

    Source: algorithms §5.4, target (i).
    """
    teacher = _Teacher(must_admit=True)
    size = CacheSize.for_model(shape, slots_per_layer=slots)
    replay(teacher, "belady", shape, size, steps, future=RecordedFuture(steps))
    if not teacher.evictions:
        raise TraceError(
            f"masked labels: a cache of {slots} slots per layer never evicts here;"
            " choose a smaller one"
        )

    # Flat, because the policy's ids count the experts of all layers.
    target = np.zeros((count, shape.layers * shape.experts), np.float32)
    counts = np.zeros(target.shape, np.bool_)
    for step, candidates, victims in teacher.evictions:
        counts[step, candidates] = True
        target[step, victims] = 1.0
    by_layer = (count, shape.layers, -1)
    return target.reshape(by_layer), counts.reshape(by_layer)


class _Teacher(Belady):
    """Belady, with a record of each eviction: step, candidates, victims."""

    def __init__(self, *, must_admit: bool) -> None:
        super().__init__(must_admit=must_admit)
        self.evictions: list[tuple[int, np.ndarray, np.ndarray]] = []

    def accessed(self, work: LayerWork) -> None:
        super().accessed(work)
        self._step = work.step

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        chosen = super().victims(incoming, candidates)
        self.evictions.append((self._step, candidates, chosen))
        return chosen
