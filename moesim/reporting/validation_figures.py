"""The result of a validation as figures, made from its JSON object."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.reporting.figures import new_figure

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.05
"""Half width of the band around equality; the margin of the equivalence test."""


def parity(result: dict[str, Any]) -> Figure:
    """Predicted against measured TPOT, one point per cell, by policy."""
    figure = new_figure(5.6, 5.0)
    axes = _axes(figure)
    for policy in _policies(result):
        cells = [cell for cell in result["cells"] if cell["policy"] == policy]
        axes.plot(
            [1e3 * cell["tpot_measured_s"] for cell in cells],
            [1e3 * cell["predicted"]["tpot_s"] for cell in cells],
            "o",
            ms=4,
            alpha=0.8,
            label=policy,
        )
    low, high = axes.get_xlim()
    # The axes become logarithmic, where nothing may be at zero.
    line = np.array([max(low, 1e-3), high])
    axes.plot(line, line, "k-", lw=0.8)
    axes.fill_between(
        line, (1 - BAND) * line, (1 + BAND) * line, color="k", alpha=0.08, lw=0
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured TPOT [ms]",
        ylabel="predicted TPOT [ms]",
    )
    axes.legend(frameon=False, fontsize=7)
    return figure


def cell_errors(result: dict[str, Any]) -> Figure:
    """Error of each cell, sorted, with its noise floor beside it."""
    figure = new_figure(7.2, 3.2)
    axes = _axes(figure)
    # A cell without decode steps has no error; it stands at zero.
    cells = sorted(result["cells"], key=lambda cell: cell["tpot_error"] or 0.0)
    positions = np.arange(len(cells))
    axes.bar(
        positions,
        [100 * (cell["tpot_error"] or 0.0) for cell in cells],
        width=0.9,
        color="tab:blue",
        label="error",
    )
    floors = np.array([100 * cell["noise_floor"] for cell in cells])
    axes.fill_between(
        positions,
        -floors,
        floors,
        step="mid",
        color="tab:orange",
        alpha=0.45,
        lw=0,
        label="noise of the measurement",
    )
    axes.set(xlabel="cells, sorted", ylabel="TPOT error [%]")
    axes.legend(frameon=False, fontsize=8)
    return figure


def token_errors(result: dict[str, Any]) -> Figure:
    """Distribution of the errors of single tokens, by policy."""
    figure = new_figure(7.2, 3.2)
    axes = _axes(figure)
    policies = _policies(result)
    samples = []
    for policy in policies:
        of_policy = [
            cell["step_errors"] for cell in result["cells"] if cell["policy"] == policy
        ]
        samples.append(100 * np.concatenate(of_policy))
    # With thousands of tokens, outliers would hide the boxes.
    axes.boxplot(samples, whis=(5, 95), showfliers=False)
    # Boxes are counted from one.
    positions = range(1, len(policies) + 1)
    axes.set_xticks(positions, policies, fontsize=7, rotation=15)
    axes.axhline(0.0, color="k", lw=0.8)
    axes.set_ylabel("error of one token [%]")
    return figure


def term_errors(result: dict[str, Any]) -> Figure:
    """Which term of the model differs, by policy: predicted minus measured, share of
    the makespan.
    """
    figure = new_figure(7.2, 3.2)
    axes = _axes(figure)
    policies = _policies(result)
    terms = result["terms"]
    # The bars of one policy fill four fifths of its place.
    width = 0.8 / len(terms)
    left_edges = np.arange(len(policies))
    for rank, term in enumerate(terms):
        medians = []
        for policy in policies:
            differences = [
                cell["terms"][term]
                for cell in result["cells"]
                if cell["policy"] == policy
            ]
            medians.append(100 * float(np.median(differences)))
        axes.bar(left_edges + rank * width, medians, width, label=term)
    axes.set_xticks(left_edges + 0.4, policies, fontsize=7, rotation=15)
    axes.axhline(0.0, color="k", lw=0.8)
    axes.set_ylabel("predicted - measured [% of run]")
    axes.legend(frameon=False, fontsize=7, ncols=5)
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "Predicted against measured time per token; the band is 5 %": parity,
    "Error of each cell, and by how much it would differ if measured anew": cell_errors,
    "Error of single tokens; boxes are quartiles, whiskers 5 % and 95 %": token_errors,
    "Which term differs: predicted minus measured, median over cells": term_errors,
}
"""Captions of the figures of the page, and the functions that draw them."""


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _policies(result: dict[str, Any]) -> list[str]:
    """Policies in the order of the grid."""
    return list(dict.fromkeys(cell["policy"] for cell in result["cells"]))


def _axes(figure: Figure) -> Axes:
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return axes
