"""Synthetic traces of a few hundred bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter

SHAPE = ModelShape(
    name="small", layers=3, experts=8, top_k=2, hidden=64, expert_intermediate=32,
    expert_bytes=(3 * 64 * 32 * 2,) * 3, other_bytes=1 << 20, heads=4, kv_heads=2,
    head_dim=16, vocab=256,
)  # fmt: skip
LARGE = replace(SHAPE, expert_bytes=(8 << 20,) * 3)
"""The same with experts of a size that memories differ in."""
SEQUENCES = 2
PROMPT_TOKENS = 5
NEW_TOKENS = 20


def write_small_trace(
    path,
    *,
    sequences=SEQUENCES,
    new_tokens=NEW_TOKENS,
    columns=("weights", "scores"),
    seed=0,
    shape=SHAPE,
):
    """Write the trace and return its path; each token keeps some taste for the experts
    of its position. `shape` differs from `SHAPE` in bytes at most.
    """
    rng = np.random.default_rng(seed)
    with TraceWriter(
        path, TraceHeader(shape, {"model": "small", "tool": "tests"}), columns
    ) as writer:
        for seq in range(sequences):
            tokens = PROMPT_TOKENS + new_tokens
            rows = tokens * SHAPE.layers
            pos = np.repeat(np.arange(tokens), SHAPE.layers)
            taste = rng.normal(size=(SHAPE.layers, SHAPE.experts))
            logits = np.tile(taste, (tokens, 1)) + rng.normal(
                size=(rows, SHAPE.experts)
            )
            scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            experts = np.argsort(-scores, axis=1)[:, : SHAPE.top_k]
            weights = np.take_along_axis(scores, experts, axis=1)
            optional = {"weights": weights, "scores": scores, "pred1_raw": scores}
            writer.write(
                np.full(rows, seq),
                pos,
                np.where(pos < PROMPT_TOKENS, Phase.PREFILL, Phase.DECODE),
                np.tile(np.arange(SHAPE.layers), tokens),
                experts,
                **{name: optional[name] for name in columns},
            )
    return path


def write_trace(
    path, shape, sequences=((4, 6),), *, columns=(), seed=0, header=None, ragged=False
):
    """Write a synthetic trace: one (prompt tokens, decode tokens) pair per sequence,
    experts drawn from `seed`.

    With `ragged`, the last layer of a prefill holds the final prompt token only.
    """
    rng = np.random.default_rng(seed)
    with TraceWriter(
        path, header or TraceHeader(shape, {"tool": "test"}), columns
    ) as writer:
        for seq, (prompt, decode) in enumerate(sequences):
            count = prompt + decode
            pos = np.repeat(np.arange(count), shape.layers)
            layer = np.tile(np.arange(shape.layers), count)
            keep = (
                (pos >= prompt - 1) | (layer < shape.layers - 1)
                if ragged
                else np.ones(len(pos), bool)
            )
            pos = pos[keep]
            layer = layer[keep]
            scores = rng.random((len(pos), shape.experts)).astype(np.float16)
            # Some experts are busier than others.
            scores += np.arange(shape.experts, dtype=np.float16) / 64
            experts = np.argsort(-scores, axis=1, kind="stable")[:, : shape.top_k]
            optional = {}
            for name in columns:
                if name == "token":
                    optional[name] = rng.integers(0, 256, len(pos))
                elif name == "weights":
                    optional[name] = np.take_along_axis(scores, experts, axis=1)
                else:
                    optional[name] = (
                        scores if name == "scores" else rng.random(scores.shape)
                    )
            phase = np.where(pos < prompt, Phase.PREFILL, Phase.DECODE)
            writer.write(seq, pos, phase, layer, experts, **optional)
    return Path(path)
