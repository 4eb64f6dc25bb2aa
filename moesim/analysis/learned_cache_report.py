"""Lays out the evaluation of a learned cache as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.analysis.learned_cache import BOUND, CAUSAL_BASELINES, LEARNED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HEAD = (
    "policy",
    "hit rate",
    "evictions",
    "optimal",
    "used again within 5",
    "delay, steps",
)


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown: one table per cache size, each with a conclusion.

    Args:
        report: as `moesim.analysis.learned_cache.report` makes it.
    """
    start, stop = report["held_out_steps"]
    held_out = (
        f"Held-out part: forward passes {start:,} to {stop - 1:,} of"
        f" `{report['trace']}`; every cache is empty at first and admits every miss,"
        " step-atomic."
    )
    lines = [
        f"# Learned cache: {report['model']}",
        "",
        held_out,
        _training_line(report["training"], report["evaluation_s"]),
    ]
    for size in report["sizes"]:
        lines += [
            "",
            f"## {size['slots']} slots per layer ({size['ratio']:.1%} of the experts)",
            "",
            *_table(size["policies"]),
            "",
            conclusion(size["policies"]),
            "",
            _requests_line(size["per_request"]),
        ]
    return "\n".join(lines) + "\n"


def _training_line(facts: Mapping[str, Any], evaluation_s: float) -> str:
    # Masked labels are made by a cache of some size, distances by a horizon.
    labels = f"K = {facts['horizon']}"
    if facts["horizon"] is None:
        labels = f"{facts['slots']} slots"
    return (
        f"Network: {facts['labels']} labels ({labels}), h = {facts['hidden']}, seed"
        f" {facts['seed']}; {facts['training_steps']:,} training and"
        f" {facts['validation_steps']:,} validation steps, {facts['epochs_run']} epochs"
        f" in {facts['seconds_s']:.0f} s, validation loss"
        f" {facts['validation_loss_first']:.4f} to {facts['validation_loss_best']:.4f};"
        f" {facts['bytes_per_layer'] / 1024:.1f} KiB per layer,"
        f" {evaluation_s * 1e6:.0f} µs per evaluation here."
    )


def _requests_line(rates: Mapping[str, float | None]) -> str:
    shown = ", ".join(f"{name} {_percent(rate)}" for name, rate in rates.items())
    return f"Served one request at a time, as the released code does: {shown}."


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, the best hit rate first."""
    alignment = "|--:" * (len(_HEAD) - 1)
    lines = [f"| {' | '.join(_HEAD)} |", f"|---{alignment}|"]
    for row in sorted(rows, key=lambda row: -(row["hit_rate"] or 0.0)):
        # Shorter than its specification, and the name that the text uses.
        name = "belady, forced" if row["policy"] == BOUND else row["policy"]
        delay = row["delay_steps"]
        cells = [
            name,
            _percent(row["hit_rate"]),
            f"{row['evictions']:,}",
            _percent(row["optimal"]),
            _percent(row["refetch_5"]),
            "" if delay is None else f"{delay:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """State whether the learned policy beats each causal baseline, in points of the hit
    rate.
    """
    rates = {row["policy"]: row["hit_rate"] or 0.0 for row in rows}
    learned = rates[LEARNED]
    points = [
        f"{100 * (learned - rates[baseline]):+.1f} to {baseline}"
        for baseline in CAUSAL_BASELINES
    ]
    # Equal is not better.
    unbeaten = [name for name in CAUSAL_BASELINES if learned <= rates[name]]
    outcome = "beats every causal rival"
    if unbeaten:
        outcome = f"does not beat {', '.join(unbeaten)}"
    return f"The learned policy {outcome}; points of hit rate: {', '.join(points)}."


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
