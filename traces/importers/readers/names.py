"""Names that engines write for our columns, and options that add others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.traces.importers.readers.errors import layout_error

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "seq": (
        "seq",
        "seq_id",
        "sequence",
        "sequence_id",
        "request",
        "request_id",
        "req_id",
        "rid",
        "problem_id",
        "prompt_id",
        "sample_id",
        "conversation_id",
    ),
    "phase": ("phase",),
    "pos": ("pos", "position", "token_idx", "token_index"),
    "layer": ("layer", "layer_idx", "layer_id"),
    "experts": ("experts", "selected_ids", "expert_ids", "ids", "topk_ids"),
    "weights": ("weights", "gate_weights", "expert_weights", "topk_weights"),
}
"""Our column -> names of it, the most explicit first."""


def named_by(path: Path, text: str, known: tuple[str, ...]) -> dict[str, str]:
    """Read the option ``map``: our column -> theirs.

    Args:
        path: the file, for errors.
        text: words ``ours=theirs``, joined by commas.
        known: our columns.

    Raises:
        TraceError: a word that is no mapping.
    """
    words = {}
    for word in filter(None, text.split(",")):
        name, equals, source = (part.strip() for part in word.partition("="))
        if not equals or name not in known:
            raise layout_error(
                path,
                f"option map: {word!r}",
                f"column=theirs with {', '.join(known)}",
                name or "nothing",
                "",
            )
        words[name] = source
    return words
