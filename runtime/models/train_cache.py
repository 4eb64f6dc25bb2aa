"""Training of FlashMoE's learned cache: from what a layer used, guess who comes back
last.

The teacher is hindsight. While a trace passes, each layer step gives one sample: the
`History` of every expert as the policy would see it, and what came afterwards. All
layers are trained side by side, as stacked matrices, but share nothing: each keeps the
weights of its own best epoch on the validation part.

S layer steps of one layer, L MoE layers, N experts per layer, B samples of a batch.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import numpy as np
import torch
from moesim.policies.cache._learned_network import History, Network, sizes
from moesim.policies.cache.belady import Belady
from moesim.policies.cache_replay import replay
from moesim.policies.planner.residency import CacheSize
from moesim.traces.errors import TraceError
from moesim.traces.files import written_beside
from moesim.traces.format.future import RecordedFuture
from safetensors.numpy import save_file
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moesim.policies.base import LayerWork
    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

Labels = Literal["distance", "masked"]
HORIZONS: Final = {64: 48, 128: 98}
LEAST_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of the training.

    Attributes:
        labels: ``distance`` regresses the steps until the next use and needs no cache;
            ``masked`` marks, at each miss of a Belady cache, whom it evicts among those
            it could. The paper says "masked" and its formula is lost; the first is what
            CECAR's training code does, and our default because it serves every cache
            size.
        hidden: h; 128 is the paper's table, 64 gives its 113 KB per layer.
        horizon: K, distances beyond it look the same; none takes 48 for 64 experts and
            98 for 128 (CECAR), else 3N/4; but no more than the validation steps, which
            could not show a longer distance.
        learning_rate, weight_decay: of AdamW; the paper's "learning rate decay 1e-2" is
            read as weight decay.
        epochs: at most so many.
        batch: layer steps per gradient step (CECAR); fewer where an epoch would have
            less than eight of them.
        patience: epochs without any layer improving by a thousandth before training
            stops (ours; CECAR waits 5).
        validation: share of the training steps, the last ones, that only decide when to
            stop.

    Source: FlashMoE and CECAR as read in algorithms §5.4.
    """

    labels: Labels = "distance"
    hidden: int = 128
    horizon: int | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    epochs: int = 200
    batch: int = 256
    patience: int = 10
    validation: float = 0.2

    def validation_steps(self, steps: int) -> int:
        """How many of so many training steps only decide when to stop."""
        return max(1, round(self.validation * steps))

    def horizon_for(self, experts: int, steps: int) -> int:
        """K, >= 2, for so many experts per layer and training steps."""
        if self.horizon is not None:
            return self.horizon
        return max(
            2,
            min(
                HORIZONS.get(experts, round(0.75 * experts)),
                self.validation_steps(steps),
            ),
        )


class Samples(NamedTuple):
    """What there is to learn, layer steps first.

    `features` float32 [S, L, 2N]; `target` float32 [S, L, N]; `counts` bool [S, L, N],
    whether an entry counts at all; `at_least` bool [S, L, N], whether the target is
    only a lower bound, because the trace ended before the next use.
    """

    features: np.ndarray
    target: np.ndarray
    counts: np.ndarray
    at_least: np.ndarray

    def part(self, start: int, stop: int) -> Self:
        """Samples of the steps from `start` to before `stop`."""
        return self._replace(
            **{name: array[start:stop] for name, array in self._asdict().items()}
        )


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained network and how it came about; `facts` is plain JSON."""

    network: Network
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a safetensors file, beside the target and then renamed onto it."""
        with written_beside(path) as part:
            save_file(
                self.network._asdict(),
                part,
                metadata={"moesim": json.dumps(self.facts, sort_keys=True)},
            )


def train(
    steps: Iterable[RoutedStep],
    shape: ModelShape,
    recipe: Recipe | None = None,
    *,
    slots: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Trained:
    """Train one network per layer on the layer steps of a trace's training part.

    Args:
        steps: the training part in replay order, numbered from 0; it is walked more
            than once.
        shape: the model.
        recipe: the constants; the defaults where None.
        slots: cache slots per layer of the teacher; needed for masked labels only.
        seed: of the first weights and the order of samples. One thread does the work,
            so equal seeds give equal bytes.
        progress: called with the number of finished epochs.

    Raises:
        TraceError: too few steps, or no miss to learn from.
    """
    recipe = recipe or Recipe()
    begin_s = time.perf_counter()
    samples = observe(steps, shape, recipe, slots)
    count = len(samples.features)
    cut = count - recipe.validation_steps(count)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fitted = _fit(
            samples.part(0, cut), samples.part(cut, count), recipe, seed, progress
        )
    finally:
        torch.set_num_threads(threads)
    facts = {
        **asdict(recipe),
        "horizon": (
            recipe.horizon_for(shape.experts, count)
            if recipe.labels == "distance"
            else None
        ),
        "model": shape.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "slots": slots if recipe.labels == "masked" else None,
        "seed": seed,
        "training_steps": cut,
        "validation_steps": count - cut,
        "bytes_per_layer": fitted.network.bytes_per_layer,
        "torch": torch.__version__,
        "seconds_s": round(time.perf_counter() - begin_s, 3),
    }
    return Trained(fitted.network, facts | fitted.facts)


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
        features.append(
            np.stack([history.features(layer) for layer in range(shape.layers)])
        )
        active.append(used)
    if len(active) < LEAST_STEPS:
        raise TraceError(
            f"training part: expected at least {LEAST_STEPS} forward passes, found"
            f" {len(active)}"
        )
    if recipe.labels == "masked":
        assert slots is not None, "masked labels are those of a cache of some size"
        target, counts = belady_labels(steps, shape, slots, len(active))
        return Samples(np.stack(features), target, counts, np.zeros_like(counts))
    target, at_least = distance_labels(
        np.stack(active), recipe.horizon_for(shape.experts, len(active))
    )
    return Samples(np.stack(features), target, np.ones_like(at_least), at_least)


def distance_labels(active: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Scaled steps until each expert's next use, strictly later, and whether they are
    only lower bounds.

    An expert that the part shows no more comes back behind its end or never, so its
    distance is at least that to the end. CECAR counts it as never; on the few hundred
    steps of a short trace that would teach that all late steps are last ones.

    Args:
        active: bool [S, ...], who is used in each step.
        horizon: K.

    Returns:
        float32 and bool, both shaped as `active`.
    """
    steps = len(active)
    distance = np.empty(active.shape, np.float32)
    ahead = np.full(active.shape[1:], np.inf, np.float32)
    for t in range(steps - 1, -1, -1):
        distance[t] = ahead
        ahead += 1.0
        ahead[active[t]] = 1.0
    to_end = np.arange(steps, 0, -1, dtype=np.float32).reshape(
        -1, *[1] * (active.ndim - 1)
    )
    unseen = np.isinf(distance)
    return scaled(np.where(unseen, to_end, distance), horizon), unseen


def scaled(distance: np.ndarray, horizon: int) -> np.ndarray:
    """``(clip(d, 1, K) - 1) / (K - 1)``, float32: 0 is the next step, 1 is K steps
    ahead or never.

    Source: algorithms §5.4, target (ii).
    """
    return ((np.clip(distance, 1.0, horizon) - 1.0) / (horizon - 1)).astype(np.float32)


def belady_labels(
    steps: Iterable[RoutedStep], shape: ModelShape, slots: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mark whom Belady evicts, and among whom, in a cache of `slots` per layer where
    every miss enters.

    Returns:
        float32 [S, L, N], 1 for victims; bool [S, L, N], true for residents that could
        have been.

    Raises:
        TraceError: the cache never evicts, so there is nothing to learn.

    Source: algorithms §5.4, target (i).
    """
    teacher = _Teacher(must_admit=True)
    size = CacheSize.of(shape.expert_bytes, shape.experts, slots_per_layer=slots)
    replay(teacher, "belady", shape, size, steps, future=RecordedFuture(steps))
    if not teacher.lessons:
        raise TraceError(
            f"masked labels: a cache of {slots} slots per layer never evicts here;"
            " choose a smaller one"
        )
    target = np.zeros((count, shape.layers * shape.experts), np.float32)
    counts = np.zeros(target.shape, np.bool_)
    for step, candidates, victims in teacher.lessons:
        counts[step, candidates] = True
        target[step, victims] = 1.0
    return target.reshape(count, shape.layers, -1), counts.reshape(
        count, shape.layers, -1
    )


class _Teacher(Belady):
    """Belady, taking notes: (step, candidates, victims) of each eviction."""

    def __init__(self, *, must_admit: bool) -> None:
        super().__init__(must_admit=must_admit)
        self.lessons: list[tuple[int, np.ndarray, np.ndarray]] = []

    def accessed(self, work: LayerWork) -> None:
        super().accessed(work)
        self._step = work.step

    def victims(self, incoming: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        chosen = super().victims(incoming, candidates)
        self.lessons.append((self._step, candidates, chosen))
        return chosen


def forward(parameters: Sequence[torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """Outputs [L, B, N] of all layers' networks for `features` [L, B, 2N]; as
    `Network.evaluate` one by one.
    """
    w1, b1, w2, b2, w3, b3 = parameters
    x = functional.silu(torch.baddbmm(b1[:, None], features, w1.mT))
    x = functional.silu(torch.baddbmm(b2[:, None], x, w2.mT))
    return torch.baddbmm(b3[:, None], x, w3.mT)


def _losses(
    parameters: Sequence[torch.Tensor],
    samples: Sequence[torch.Tensor],
    rows: torch.Tensor,
) -> torch.Tensor:
    """Mean squared error of each layer over the entries that count, [L], for the given
    steps.
    """
    features, target, counts, at_least = (
        array[rows].transpose(0, 1) for array in samples
    )
    error = forward(parameters, features) - target
    error = torch.where(at_least, error.clamp(max=0.0), error)
    return (error.square() * counts).sum(dim=(1, 2)) / counts.sum(dim=(1, 2)).clamp(
        min=1
    )


def _initial(layers: int, experts: int, hidden: int, seed: int) -> list[torch.Tensor]:
    """Weights and biases uniform within ``1 / sqrt(inputs)``, as `torch.nn.Linear`
    begins.
    """
    draws = torch.Generator().manual_seed(seed)
    inputs = {"1": 2 * experts, "2": hidden, "3": hidden}
    return [
        torch.empty(size)
        .uniform_(-1.0, 1.0, generator=draws)
        .div_(math.sqrt(inputs[name[1]]))
        .requires_grad_()
        for name, size in sizes(layers, experts, hidden).items()
    ]


def _fit(
    samples: Samples,
    validation: Samples,
    recipe: Recipe,
    seed: int,
    progress: Callable[[int], None] | None,
) -> Trained:
    """Descend until no layer improves any more; keep each layer's best epoch."""
    count, layers, _ = samples.features.shape
    parameters = _initial(layers, samples.target.shape[2], recipe.hidden, seed)
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    data = [torch.from_numpy(np.ascontiguousarray(array)) for array in samples]
    held = [torch.from_numpy(np.ascontiguousarray(array)) for array in validation]
    draws = torch.Generator().manual_seed(seed)
    best = [parameter.detach().clone() for parameter in parameters]
    first = lowest = _evaluate(parameters, held, recipe.batch)
    chosen = torch.zeros(layers, dtype=torch.int64)
    improved = 0
    epoch = 0
    for epoch in range(1, recipe.epochs + 1):
        for rows in torch.randperm(count, generator=draws).split(
            min(recipe.batch, max(1, count // 8))
        ):
            optimizer.zero_grad()
            _losses(parameters, data, rows).sum().backward()
            optimizer.step()
        loss = _evaluate(parameters, held, recipe.batch)
        if (loss < 0.999 * lowest).any():
            improved = epoch
        better = loss < lowest
        lowest = torch.where(better, loss, lowest)
        chosen[better] = epoch
        for kept, parameter in zip(best, parameters, strict=True):
            kept[better] = parameter.detach()[better]
        if progress is not None:
            progress(epoch)
        if epoch - improved >= recipe.patience:
            break
    facts = {
        "epochs_run": epoch,
        "best_epochs": chosen.tolist(),
        "validation_loss_first": round(float(first.mean()), 6),
        "validation_loss_best": round(float(lowest.mean()), 6),
    }
    return Trained(Network(*(kept.numpy() for kept in best)), facts)


@torch.no_grad()
def _evaluate(
    parameters: Sequence[torch.Tensor], samples: Sequence[torch.Tensor], batch: int
) -> torch.Tensor:
    """Loss of each layer over all samples, [L]: batches weigh by their steps."""
    rows = torch.arange(len(samples[0]))
    parts = [
        _losses(parameters, samples, part) * len(part) for part in rows.split(batch)
    ]
    return torch.stack(parts).sum(dim=0) / len(rows)
