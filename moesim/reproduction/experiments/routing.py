"""What the gates do, before any policy: how alike prompt and answer are, how soon all
experts are touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesim.reproduction.experiments.base import Experiment, Workload
from moesim.traces.format.schema import Phase

if TYPE_CHECKING:
    from moesim.reproduction.experiments.base import Found

TOKENS = (32, 64, 128, 256)


def daop_similarity(load: Workload) -> Found:
    """Cosine of the share of tokens routed to each expert in prefill and in decode,
    mean over layers and sequences.
    """
    layers = load.shape.layers
    experts = load.shape.experts
    cosines: list[float] = []
    for rows in load.trace.sequences():
        counts = np.zeros((len(Phase), layers, experts))
        for phase in Phase:
            mine = rows.phase == phase
            layer = np.broadcast_to(rows.layer[mine][:, None], rows.experts[mine].shape)
            np.add.at(counts[phase], (layer, rows.experts[mine].astype(np.int64)), 1.0)
        length = np.linalg.norm(counts, axis=2)
        both = length.all(axis=0)
        if both.any():
            product = (counts[Phase.PREFILL] * counts[Phase.DECODE]).sum(axis=1)[both]
            cosines.append(float((product / length[:, both].prod(axis=0)).mean()))
    return {
        "prefill against decode": (
            100.0 * float(np.mean(cosines)) if cosines else "lacks prefill or decode"
        )
    }


def flashmoe_prefill(load: Workload) -> Found:
    """Share of a layer's experts that the first so many tokens of a sequence touch,
    mean over layers and sequences.
    """
    layers = load.shape.layers
    experts = load.shape.experts
    shares: dict[int, list[float]] = {count: [] for count in TOKENS}
    for rows in load.trace.sequences():
        for layer in range(layers):
            chosen = rows.experts[rows.layer == layer]
            for count in TOKENS:
                if len(chosen) >= count:
                    shares[count].append(len(np.unique(chosen[:count])) / experts)
    return {
        f"{count} tokens": (
            100.0 * float(np.mean(found))
            if found
            else f"lacks sequences of {count} tokens"
        )
        for count, found in shares.items()
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
