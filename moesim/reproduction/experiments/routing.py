"""Routing before any policy: similarity of prompt and answer, and how soon all experts
are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.reproduction.experiments.base import Excerpt, Experiment
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.reproduction.experiments.base import Figures

TOKENS = (32, 64, 128, 256)


def daop_similarity(excerpt: Excerpt) -> Figures:
    """Cosine of the share of tokens routed to each expert in prefill and in decode,
    mean over layers and sequences.
    """
    layers = excerpt.shape.layers
    experts = excerpt.shape.experts
    cosines: list[float] = []
    for rows in excerpt.trace.sequences():
        # Counts, not shares: the cosine does not depend on their scale.
        counts = np.zeros((len(Phase), layers, experts))
        for phase in Phase:
            in_phase = rows.phase == phase
            chosen = rows.experts[in_phase].astype(np.int64)
            layer = np.broadcast_to(rows.layer[in_phase][:, None], chosen.shape)
            # Ids repeat within a phase, so plain indexing would count them once.
            np.add.at(counts[phase], (layer, chosen), 1.0)
        norms = np.linalg.norm(counts, axis=2)
        # A layer without tokens in one phase has no direction to compare.
        in_both = norms.all(axis=0)
        if in_both.any():
            products = (counts[Phase.PREFILL] * counts[Phase.DECODE]).sum(axis=1)
            scale = norms[:, in_both].prod(axis=0)
            cosines.append(float((products[in_both] / scale).mean()))
    similarity: float | str = "lacks prefill or decode"
    if cosines:
        similarity = 100.0 * float(np.mean(cosines))
    return {"prefill against decode": similarity}


def flashmoe_prefill(excerpt: Excerpt) -> Figures:
    """Share of a layer's experts that the first so many tokens of a sequence use, mean
    over layers and sequences.
    """
    layers = excerpt.shape.layers
    experts = excerpt.shape.experts
    shares: dict[int, list[float]] = {count: [] for count in TOKENS}
    for rows in excerpt.trace.sequences():
        for layer in range(layers):
            chosen = rows.experts[rows.layer == layer]
            for count in TOKENS:
                # Shorter sequences would count as if they stopped using experts.
                if len(chosen) >= count:
                    distinct = len(np.unique(chosen[:count]))
                    shares[count].append(distinct / experts)
    return {
        f"{count} tokens": (
            100.0 * float(np.mean(of_layers))
            if of_layers
            else f"lacks sequences of {count} tokens"
        )
        for count, of_layers in shares.items()
    }


EXPERIMENTS = (
    Experiment(
        name="daop-similarity",
        summary="how alike experts are chosen in prompt and answer (DAOP, table II)",
        published=(("DAOP", "Table II", "prefill_decode_similarity"),),
        unit="%",
        needs="routing of prefill and decode",
        computes=(
            "Cosine of how often each expert is chosen in prefill and in decode, per"
            " layer, mean over layers and sequences (DAOP, equation 1)."
        ),
        caveats=(
            (
                "short prompts and answers make the counts uneven and the cosine low;"
                " the paper's are longer"
            ),
            "a layer that saw no prefill token is left out",
        ),
        row=lambda _, setting: (
            "prefill against decode" if setting["dataset"] == "Average" else None
        ),
        run=daop_similarity,
    ),
    Experiment(
        name="flashmoe-prefill",
        summary="experts touched by the first tokens (FlashMoE, section 4.2)",
        published=(("FlashMoE", "4.2", "experts_loaded_in_prefill"),),
        unit="%",
        needs="routing",
        computes=(
            "Distinct experts among a sequence's first n tokens over all experts, mean"
            " over layers and sequences."
        ),
        caveats=(
            (
                "where the prompt is shorter than n tokens, generated ones are counted"
                " as well"
            ),
            (
                "the share follows from experts, top k and batch, so other models"
                " differ by construction"
            ),
        ),
        row=lambda _, setting: f"{setting['input_tokens']} tokens",
        run=flashmoe_prefill,
    ),
)
