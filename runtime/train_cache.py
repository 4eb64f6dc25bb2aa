"""Trains FlashMoE's cache policy: samples from the accesses of a trace, and the
network.

The teacher is hindsight. While a trace passes, each layer step gives one sample: the
`History` of every expert as the policy would see it, and what came afterwards.

All layers are trained side by side, as stacked matrices, but share nothing: each keeps
the weights of its own best epoch on the validation part.

Source: FlashMoE (arXiv 2601.17063), its training; CECAR, `ML_Train.py`, for what is
learned: the steps until the next use, which serve every cache size. The paper says
"masked" labels, whose formula is not printed.

S layer steps of one layer, L MoE layers, N experts per layer, B samples of a batch.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors.numpy import save
from torch.nn import functional

from moesim.base.errors import TraceError
from moesim.base.files import write_bytes
from moesim.base.seals import sealed_metadata
from moesim.policies.cache._learned_network import History, Network, sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

HORIZONS: Final = {64: 48, 128: 98}
"""CECAR's horizon K by experts per layer."""

HIDDEN: Final = 128
"""h of the paper's table; 64 gives its 113 KB per layer."""
EPOCHS: Final = 200

# The paper's "learning rate decay 1e-2" is read as weight decay.
_LEARNING_RATE: Final = 1e-3
_WEIGHT_DECAY: Final = 1e-2

# Layer steps per gradient step (CECAR), but at least so many of these per epoch: else a
# short trace would take one.
_BATCH: Final = 256
_LEAST_BATCHES: Final = 8

# Epochs without any layer improving before training stops (ours; CECAR waits 5). A
# layer improves if its loss falls by a thousandth: less is noise.
_PATIENCE: Final = 10
_IMPROVEMENT: Final = 0.999

# Share of the training steps, the last ones, that only decide when to stop.
_VALIDATION: Final = 0.2

LEAST_STEPS: Final = 20


def validation_steps(steps: int) -> int:
    """Return how many of so many training steps only decide when to stop."""
    return max(1, round(_VALIDATION * steps))


def horizon_for(experts: int, steps: int) -> int:
    """K, >= 2, for so many experts per layer and training steps: distances beyond it
    look the same.

    48 for 64 experts and 98 for 128 (CECAR), else 3N/4; but no more than the validation
    steps, which could not show a longer distance.
    """
    usual = HORIZONS.get(experts, round(0.75 * experts))
    # At least 2: the scaled distance divides by K - 1.
    return max(2, min(usual, validation_steps(steps)))


def observe(steps: Iterable[RoutedStep], shape: ModelShape) -> list[torch.Tensor]:
    """Walk a trace to count its steps, and for features and distances.

    Returns:
        Features float32 [S, L, 2N], targets float32 [S, L, N], and whether a target is
        only a lower bound, because the trace ended before the next use, bool [S, L, N].

    Raises:
        TraceError: too few steps.
    """
    # Counted first: arrays of a list take twice the memory while they are joined.
    count = sum(1 for _ in steps)
    if count < LEAST_STEPS:
        raise TraceError(
            f"training part: expected at least {LEAST_STEPS} forward passes, found"
            f" {count}"
        )
    features = np.empty((count, shape.layers, 2 * shape.experts), np.float32)
    active = np.zeros((count, shape.layers, shape.experts), np.bool_)
    history = History(shape.layers, shape.experts)
    for used, of_step, step in zip(active, features, steps, strict=True):
        for routed in step.layers:
            history.note(routed.layer, routed.experts)
            used[routed.layer, routed.experts] = True
        # After the step is noted: the policy decides when it has seen its accesses.
        for layer in range(shape.layers):
            of_step[layer] = history.features(layer)

    horizon = horizon_for(shape.experts, count)
    return list(map(torch.from_numpy, (features, *distance_labels(active, horizon))))


def distance_labels(active: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps d until each expert's next use, strictly later, scaled to
    ``(clip(d, 1, K) - 1) / (K - 1)``: 0 is the next step, 1 is K steps ahead or never;
    and whether they are only lower bounds.

    An expert that the part shows no more comes back behind its end or never, so its
    distance is at least that to the end. CECAR counts it as never; on the few hundred
    steps of a short trace that would teach that all late steps are last ones.

    Args:
        active: bool [S, ...], the experts used in each step.
        horizon: K.

    Returns:
        float32 and bool, both shaped as `active`.

    Source: CECAR, `ML_Train.py`.
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
    np.copyto(distance, until_end, where=unseen)
    # In place: these are the largest arrays of the training.
    np.clip(distance, 1.0, horizon, out=distance)
    distance -= 1.0
    distance /= horizon - 1
    return distance, unseen


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained network and how it came about; `facts` is plain JSON."""

    network: Network
    facts: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write a safetensors file, beside the target and then renamed onto it."""
        metadata = {"moesim": json.dumps(self.facts, sort_keys=True)}
        arrays = self.network._asdict()
        write_bytes(path, save(arrays, sealed_metadata(arrays, metadata)))


def train(
    steps: Iterable[RoutedStep],
    shape: ModelShape,
    *,
    hidden: int = HIDDEN,
    epochs: int = EPOCHS,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Trained:
    """Train one network per layer on the layer steps of a trace's training part.

    Args:
        steps: the training part in replay order, numbered from 0; it is walked more
            than once.
        shape: the model.
        hidden: h, units of the two inner layers.
        epochs: at most so many.
        seed: of the first weights and the order of samples. One thread does the work,
            so equal seeds give equal bytes.
        progress: called with the number of finished epochs.

    Raises:
        TraceError: too few steps.
    """
    begin_s = time.perf_counter()
    samples = observe(steps, shape)
    count = len(samples[0])
    training_steps = count - validation_steps(count)

    # Several threads add in an order of their own, and sums depend on it.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network, progress_facts = _fit(
            [array[:training_steps] for array in samples],
            [array[training_steps:] for array in samples],
            hidden,
            epochs,
            seed,
            progress,
        )
    finally:
        torch.set_num_threads(threads)
    return Trained(
        network,
        {
            "hidden": hidden,
            "horizon": horizon_for(shape.experts, count),
            "model": shape.name,
            "layers": shape.layers,
            "experts": shape.experts,
            "seed": seed,
            "training_steps": training_steps,
            "validation_steps": count - training_steps,
            "bytes_per_layer": network.bytes_per_layer,
            "torch": torch.__version__,
            "seconds_s": round(time.perf_counter() - begin_s, 3),
            **progress_facts,
        },
    )


def forward(parameters: Sequence[torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """Outputs [L, B, N] of all layers' networks for `features` [L, B, 2N]; as
    `Network.evaluate` one by one.
    """
    w1, b1, w2, b2, w3, b3 = parameters
    x = functional.silu(torch.baddbmm(b1[:, None], features, w1.mT))
    x = functional.silu(torch.baddbmm(b2[:, None], x, w2.mT))
    return torch.baddbmm(b3[:, None], x, w3.mT)


def _fit(
    samples: Sequence[torch.Tensor],
    held_out: Sequence[torch.Tensor],
    hidden: int,
    epochs: int,
    seed: int,
    progress: Callable[[int], None] | None,
) -> tuple[Network, dict[str, Any]]:
    """Descend until no layer improves any more; keep each layer's best epoch."""
    count, layers, experts = samples[1].shape
    parameters = _initial(layers, experts, hidden, seed)
    optimizer = torch.optim.AdamW(
        parameters, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
    )
    draws = torch.Generator().manual_seed(seed)
    batch = min(_BATCH, max(1, count // _LEAST_BATCHES))

    # The first weights count as an epoch: training may only make it worse.
    best = [parameter.detach().clone() for parameter in parameters]
    best_epochs = torch.zeros(layers, dtype=torch.int64)
    first = lowest = _evaluate(parameters, held_out)
    improved = 0
    epoch = 0
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(count, generator=draws).split(batch):
            optimizer.zero_grad()
            # Layers share no weights, so the gradient of the sum is that of each.
            _losses(parameters, samples, rows).sum().backward()
            optimizer.step()

        loss = _evaluate(parameters, held_out)
        if (loss < _IMPROVEMENT * lowest).any():
            improved = epoch
        better = loss < lowest
        lowest = torch.where(better, loss, lowest)
        best_epochs[better] = epoch
        for best_parameter, parameter in zip(best, parameters, strict=True):
            best_parameter[better] = parameter.detach()[better]

        if progress is not None:
            progress(epoch)
        if epoch - improved >= _PATIENCE:
            break

    facts = {
        "epochs_run": epoch,
        "best_epochs": best_epochs.tolist(),
        "validation_loss_first": round(float(first.mean()), 6),
        "validation_loss_best": round(float(lowest.mean()), 6),
    }
    return Network(*(parameter.numpy() for parameter in best)), facts


def _initial(layers: int, experts: int, hidden: int, seed: int) -> list[torch.Tensor]:
    """Weights and biases uniform within ``1 / sqrt(inputs)``, as `torch.nn.Linear`
    begins.
    """
    draws = torch.Generator().manual_seed(seed)
    # By the number in a parameter's name: w1 and b1 have the inputs of the first layer.
    inputs = {"1": 2 * experts, "2": hidden, "3": hidden}
    parameters = []
    for name, size in sizes(layers, experts, hidden).items():
        parameter = torch.empty(size).uniform_(-1.0, 1.0, generator=draws)
        parameter.div_(math.sqrt(inputs[name[1]]))
        parameters.append(parameter.requires_grad_())
    return parameters


def _losses(
    parameters: Sequence[torch.Tensor],
    samples: Sequence[torch.Tensor],
    rows: torch.Tensor,
) -> torch.Tensor:
    """Mean squared error of each layer, [L], for the given steps."""
    features, target, at_least = (array[rows].transpose(0, 1) for array in samples)
    error = forward(parameters, features) - target
    # Above a lower bound the answer may be right: only less than it is an error.
    error = torch.where(at_least, error.clamp(max=0.0), error)
    return error.square().sum(dim=(1, 2)) / error[0].numel()


@torch.no_grad()
def _evaluate(
    parameters: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Loss of each layer over all samples, [L]: batches weigh by their steps."""
    rows = torch.arange(len(samples[0]))
    losses = [
        _losses(parameters, samples, part) * len(part) for part in rows.split(_BATCH)
    ]
    return torch.stack(losses).sum(dim=0) / len(rows)
