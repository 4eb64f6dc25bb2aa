"""Marks of a trace whose parts were drawn and not recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesim.traces.format.schema import TraceHeader

PREDICTIONS = "synthetic_predictions"
"""Key of the header's provenance: column -> what was drawn, and how."""

WIDTHS = "expert_widths"
"""Key of the header's provenance: how experts of one layer got widths of their own."""

FITTED_SEQUENCES = "fitted_sequences"
"""Key of the header's provenance: how many sequences a drawn trace was fitted to."""
ENOUGH_SEQUENCES = 8
"""From so many on, what is popular in a model is told from what is so in one text."""


def predictions_text(drawn: dict[str, Any]) -> str:
    """Return the entry `PREDICTIONS` of a header as words on one line."""
    parts = []
    for column, entry in drawn.items():
        if column == "scores":
            text = (
                "scores and weights drawn" if entry.get("weights") else "scores drawn"
            )
        else:
            at = entry.get("recall_at")
            recall = "recall" if at is None else f"recall at {at}"
            measured = entry.get("recall_measured", 0)
            asked = entry.get("recall_asked")
            text = f"{column} {recall} {measured:.3f} (asked {asked:g})"
        parts.append(f"{text}, seed {entry.get('seed')}")
    return "; ".join(parts)


def widths_text(given: dict[str, Any]) -> str:
    """Return the entry `WIDTHS` of a header as words on one line."""
    if "table" in given:
        return f"as {given['table']} says"
    bits = ", ".join(f"{width:g}" for width in given.get("bits", []))
    shares = ", ".join(f"{100 * share:.3g} %" for share in given.get("shares", []))
    by = given.get("by")
    rule = f"by {by}, highest first"
    if by == "random":
        rule = f"at random (seed {given.get('seed')})"
    return f"{bits} bits for {shares} of each layer's experts, {rule}"


def synthetic_caveats(header: TraceHeader) -> list[str]:
    """Return what a reader of a replay must know of a trace that was drawn, whole or in
    part: one line for its routing, one for its predictions, one for widths of experts.
    """
    provenance = header.provenance
    caveats = []
    if provenance.get("synthetic") is True:
        like = provenance.get("like")
        source = f"like {like}" if like else "with stated statistics"
        few = provenance.get(FITTED_SEQUENCES, ENOUGH_SEQUENCES)
        if few < ENOUGH_SEQUENCES:
            texts = "one sequence" if few == 1 else f"{few} sequences"
            source += f" ({texts}: what others have in common is assumed)"
        caveats.append(f"synthetic routing: drawn {source}, not recorded")

    drawn = provenance.get(PREDICTIONS)
    if isinstance(drawn, dict) and drawn:
        caveats.append(f"synthetic predictions: {predictions_text(drawn)}")

    given = provenance.get(WIDTHS)
    if isinstance(given, dict) and given:
        caveats.append(f"stated widths of experts: {widths_text(given)}")
    return caveats
