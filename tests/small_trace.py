"""A trace of a few hundred bytes for the tests of the face: two sequences, three
layers, learned-looking routing.
"""

import numpy as np

from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter

SHAPE = ModelShape(
    name="small",
    layers=3,
    experts=8,
    top_k=2,
    hidden=64,
    expert_intermediate=32,
    expert_bytes=(3 * 64 * 32 * 2,) * 3,
    other_bytes=1 << 20,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=256,
)
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
):
    """Write the trace and return its path; each token keeps some taste for the experts
    of its position.
    """
    rng = np.random.default_rng(seed)
    with TraceWriter(
        path, TraceHeader(SHAPE, {"model": "small", "tool": "tests"}), columns
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
