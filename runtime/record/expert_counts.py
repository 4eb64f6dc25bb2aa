"""Writes how often experts were used, as SGLang's recorder does and kt-kernel reads.

``--init-expert-location FILE.pt`` with ``--kt-expert-placement-strategy frequency``
takes a tensor ``logical_count`` [passes, layers, experts] over all layers of the model,
those without experts included. Source: `kt_ep_wrapper.py` of kvcache-ai/sglang.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

from moesim.traces.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np


def write_expert_counts(
    path: Path, counts: np.ndarray, moe_layers: Sequence[int], layers: int
) -> None:
    """Write counts, beside the target first: an interrupt leaves no half file.

    Args:
        path: ends in ``.pt``, by which the engine knows it.
        counts: int64 [MoE layers, experts].
        moe_layers: index in the model of each row.
        layers: of the model.
    """
    everywhere = torch.zeros((1, layers, counts.shape[1]), dtype=torch.int64)
    everywhere[0, list(moe_layers)] = torch.from_numpy(counts)

    archive = io.BytesIO()
    torch.save({"logical_count": everywhere}, archive)
    write_bytes(path, archive.getbuffer())
