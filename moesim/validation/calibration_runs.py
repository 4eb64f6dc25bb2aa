"""Designed runs: routing that is drawn, and trials that excite every cost and every
overlap a run can have.

What is learned from and what is compared may both run these; nothing here knows of a
fit or of a comparison.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesim.policies.registry import names_with
from moesim.runs.memory import MemoryOptions
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import ModelShape, Phase
from moesim.validation.paired_runs import Trial

LAYERS = 6
EXPERTS = 32
TOP_K = 4
"""Routing of the designed runs."""
ROUTED = ModelShape("designed", LAYERS, EXPERTS, TOP_K, 64, 64, (1,) * LAYERS, 1)
_REUSE = 0.5
"""Chance that a token keeps an expert of the token before."""
_COMPETING = "greedy+lru"


class Design(NamedTuple):
    """One designed run: what it is for, and the trial."""

    purpose: str
    trial: Trial


def drawn_steps(
    *, batch: int | tuple[int, ...], prompt: int, decode: int, seed: int
) -> list[RoutedStep]:
    """Draw forward passes: a prefill of `prompt` tokens per sequence (none if 0), then
    `decode` steps.

    Several batch sizes take turns, as if sequences came and went.
    """
    rng = np.random.default_rng(seed)
    sizes = (batch,) if isinstance(batch, int) else batch
    steps = []
    last = rng.random((max(sizes), LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
    for number in range(decode + (prompt > 0)):
        sequences = sizes[number % len(sizes)]
        prefill = prompt > 0 and number == 0
        tokens = prompt * sequences if prefill else sequences
        if prefill:
            chosen = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        else:
            last = _next(last, rng)
            chosen = last[:sequences]
        layers = [_layer(layer, chosen[:, layer]) for layer in range(LAYERS)]
        context = prompt + number + (prompt == 0)
        phase = Phase.PREFILL if prefill else Phase.DECODE
        steps.append(RoutedStep(number, phase, 0, tokens, context, sequences, layers))
    return steps


def _next(last: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Experts of the next token [B, L, K]: some of the last ones, the rest drawn."""
    liked = rng.random((*last.shape[:2], EXPERTS))
    kept = rng.random(last.shape) < _REUSE
    np.put_along_axis(
        liked, last, np.where(kept, 2.0, np.take_along_axis(liked, last, -1)), -1
    )
    return liked.argsort(-1)[..., ::-1][..., :TOP_K]


def _layer(layer: int, routing: np.ndarray) -> RoutedLayer:
    experts, tokens = np.unique(routing, return_counts=True)
    return RoutedLayer(
        layer,
        experts.astype(np.int32),
        tokens.astype(np.int32),
        np.ascontiguousarray(routing, np.uint16),
        None,
        None,
        {},
    )


def designs(shape: ModelShape, *, quick: bool = False, seed: int = 0) -> list[Design]:
    """The designed set for one shape: every cost and every overlap that a run of any
    policy can have.
    """
    length = 10 if quick else 24
    alone = drawn_steps(batch=1, prompt=96, decode=length, seed=seed)
    many = drawn_steps(
        batch=(2, 8, 4, 3), prompt=0, decode=max(12, length), seed=seed + 1
    )
    prompt = drawn_steps(batch=4, prompt=96, decode=max(4, length // 3), seed=seed + 2)
    short = drawn_steps(
        batch=(1, 4), prompt=24, decode=max(6, length // 2), seed=seed + 3
    )
    everything = sum(shape.expert_bytes) * shape.experts
    ratio = MemoryOptions
    found = [
        Design("CPU alone", Trial("all-cpu+none", ratio(cache_ratio=0.0), alone)),
        Design(
            "CPU alone, many tokens",
            Trial("all-cpu+none", ratio(cache_ratio=0.0), prompt),
        ),
        Design(
            "copies and GPU in turn",
            Trial("on-demand+lru", ratio(cache_ratio=0.0), alone),
        ),
        Design("GPU alone", Trial("on-demand+lru", ratio(cache_ratio=1.0), many)),
        Design(
            "GPU, many tokens", Trial("on-demand+lru", ratio(cache_ratio=0.3), prompt)
        ),
        Design(
            "CPU beside GPU and copies",
            Trial(_COMPETING, ratio(cache_ratio=0.3), alone),
        ),
        Design(
            "CPU beside GPU and copies, batch",
            Trial(_COMPETING, ratio(cache_ratio=0.6), many),
        ),
        Design("CPU beside copies", Trial(_COMPETING, ratio(cache_ratio=0.0), many)),
        Design(
            "SSD and CPU",
            Trial(
                "all-cpu+none",
                ratio(cache_ratio=0.0, host_memory_bytes=everything // 2),
                many,
            ),
        ),
        Design(
            "SSD and copies",
            Trial(
                "on-demand+lru",
                ratio(cache_ratio=0.3, host_memory_bytes=everything // 2),
                short,
            ),
        ),
        Design(
            "all lanes",
            Trial(
                _COMPETING,
                ratio(cache_ratio=0.3, host_memory_bytes=everything // 2),
                alone,
            ),
        ),
    ]
    return found + [
        Design(
            f"planning of {name}", Trial(f"{name}+lru", ratio(cache_ratio=0.3), short)
        )
        for name in names_with("assignment", "calibrates_planning")
    ]
