"""Trains FlashMoE's cache network: from an expert's history to its next use.

All layers are trained side by side, as stacked matrices, but share nothing: each keeps
the weights of its own best epoch on the validation part.

S layer steps of one layer, L MoE layers, N experts per layer, B samples of a batch.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors.numpy import save
from torch.nn import functional

from moesim.policies.cache._learned_network import Network, sizes
from moesim.runtime.train.cache_recipe import Recipe
from moesim.runtime.train.cache_samples import Samples, observe
from moesim.traces.files import write_bytes
from moesim.traces.tensor_seal import sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.schema import ModelShape

# A layer improves if its loss falls by a thousandth: less is noise.
_IMPROVEMENT: Final = 0.999

# Else a short trace would take one gradient step per epoch.
_LEAST_BATCHES: Final = 8


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained network and how it came about; `facts` is plain JSON."""

    network: Network
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a safetensors file, beside the target and then renamed onto it."""
        metadata = {"moesim": json.dumps(self.facts, sort_keys=True)}
        arrays = self.network._asdict()
        write_bytes(path, save(arrays, sealed(arrays, metadata)))


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
    training_steps = count - recipe.validation_steps(count)

    # Several threads add in an order of their own, and sums depend on it.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fitted = _fit(
            samples.part(0, training_steps),
            samples.part(training_steps, count),
            recipe,
            seed,
            progress,
        )
    finally:
        torch.set_num_threads(threads)

    by_distance = recipe.labels == "distance"
    horizon = recipe.horizon_for(shape.experts, count) if by_distance else None
    facts = {
        **asdict(recipe),
        "horizon": horizon,
        "model": shape.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "slots": slots if recipe.labels == "masked" else None,
        "seed": seed,
        "training_steps": training_steps,
        "validation_steps": count - training_steps,
        "bytes_per_layer": fitted.network.bytes_per_layer,
        "torch": torch.__version__,
        "seconds_s": round(time.perf_counter() - begin_s, 3),
    }
    return Trained(fitted.network, facts | fitted.facts)


def forward(parameters: Sequence[torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """Outputs [L, B, N] of all layers' networks for `features` [L, B, 2N]; as
    `Network.evaluate` one by one.
    """
    w1, b1, w2, b2, w3, b3 = parameters
    x = functional.silu(torch.baddbmm(b1[:, None], features, w1.mT))
    x = functional.silu(torch.baddbmm(b2[:, None], x, w2.mT))
    return torch.baddbmm(b3[:, None], x, w3.mT)


def _fit(
    samples: Samples,
    validation: Samples,
    recipe: Recipe,
    seed: int,
    progress: Callable[[int], None] | None,
) -> Trained:
    """Descend until no layer improves any more; keep each layer's best epoch."""
    count, layers, _ = samples.features.shape
    experts = samples.target.shape[2]
    parameters = _initial(layers, experts, recipe.hidden, seed)
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    data = _tensors(samples)
    held_out = _tensors(validation)
    draws = torch.Generator().manual_seed(seed)
    batch = min(recipe.batch, max(1, count // _LEAST_BATCHES))

    # The first weights count as an epoch: training may only make it worse.
    best = [parameter.detach().clone() for parameter in parameters]
    best_epochs = torch.zeros(layers, dtype=torch.int64)
    first = _evaluate(parameters, held_out, recipe.batch)
    lowest = first
    improved = 0
    epoch = 0
    for epoch in range(1, recipe.epochs + 1):
        for rows in torch.randperm(count, generator=draws).split(batch):
            optimizer.zero_grad()
            # Layers share no weights, so the gradient of the sum is that of each.
            _losses(parameters, data, rows).sum().backward()
            optimizer.step()

        loss = _evaluate(parameters, held_out, recipe.batch)
        if (loss < _IMPROVEMENT * lowest).any():
            improved = epoch
        better = loss < lowest
        lowest = torch.where(better, loss, lowest)
        best_epochs[better] = epoch
        for best_parameter, parameter in zip(best, parameters, strict=True):
            best_parameter[better] = parameter.detach()[better]

        if progress is not None:
            progress(epoch)
        if epoch - improved >= recipe.patience:
            break

    facts = {
        "epochs_run": epoch,
        "best_epochs": best_epochs.tolist(),
        "validation_loss_first": round(float(first.mean()), 6),
        "validation_loss_best": round(float(lowest.mean()), 6),
    }
    return Trained(Network(*(parameter.numpy() for parameter in best)), facts)


def _tensors(samples: Samples) -> list[torch.Tensor]:
    """Return the arrays of samples as tensors, in the order of the fields."""
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in samples]


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
    """Mean squared error of each layer over the entries that count, [L], for the given
    steps.
    """
    features, target, counts, at_least = (
        array[rows].transpose(0, 1) for array in samples
    )
    error = forward(parameters, features) - target
    # Above a lower bound the answer may be right: only less than it is an error.
    error = torch.where(at_least, error.clamp(max=0.0), error)
    totals = (error.square() * counts).sum(dim=(1, 2))
    return totals / counts.sum(dim=(1, 2)).clamp(min=1)


@torch.no_grad()
def _evaluate(
    parameters: Sequence[torch.Tensor], samples: Sequence[torch.Tensor], batch: int
) -> torch.Tensor:
    """Loss of each layer over all samples, [L]: batches weigh by their steps."""
    rows = torch.arange(len(samples[0]))
    losses = [
        _losses(parameters, samples, part) * len(part) for part in rows.split(batch)
    ]
    return torch.stack(losses).sum(dim=0) / len(rows)
