"""The picture of a sweep: time over its longest axis, a line for each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.reporting.figures import new_figure
from moesim.reporting.sweeps.words import axis_head, axis_value
from moesim.sweeps.ranking import ranking

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 12
"""Panels that a picture can hold; a page shows the rest."""

MOST_PANELS_ABREAST = 4


def sweep_figure(frame: pd.DataFrame) -> Figure:
    """Draw the time of each policy over the axis with the most values, a panel for each
    combination of the others; bands are 95 % intervals, policies that see the future
    are dashed.

    Args:
        frame: of `moesim.sweep`, with ``details=True``.
    """
    ranked = ranking(frame)
    cells: list[str] = ranked.attrs["cells"]
    axis = max(cells, key=lambda name: ranked[name].nunique(), default=None)
    others = [name for name in cells if name != axis]
    panels: list[tuple[Any, pd.DataFrame]] = [((), ranked)]
    if others:
        panels = list(ranked.groupby(others, sort=False, dropna=False))[:MOST_PANELS]

    columns = min(MOST_PANELS_ABREAST, len(panels))
    rows = -(-len(panels) // columns)  # rounded up
    figure = new_figure(2.2 + 3.2 * columns, 0.6 + 2.8 * rows)
    # One scale for all panels, from zero, so that heights can be compared.
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for place, (key, panel) in zip(grid, panels, strict=False):
        _draw(place, panel, axis)
        values = zip(others, key, strict=True)
        words = [axis_value(name, value) for name, value in values]
        place.set_title(", ".join(words), fontsize=9, loc="left")
    for place in grid[len(panels) :]:
        place.set_visible(False)

    per_token = ranked.attrs["measure"] == "tpot_s"
    grid[0].set_ylabel("ms per token" if per_token else "ms, whole trace")
    grid[0].set_ylim(0, 1e3 * ranked["seconds"].max() * 1.05)
    figure.legend(
        *grid[0].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw(place: Axes, panel: pd.DataFrame, axis: str | None) -> None:
    # Without an axis every policy has one point.
    values = [None] if axis is None else list(panel[axis].unique())
    positions = {value: position for position, value in enumerate(values)}
    for candidate, line in panel.groupby("candidate", sort=True):
        at = [0] * len(line) if axis is None else line[axis].map(positions)
        style = "--" if line["oracle"].any() else "-"
        (drawn,) = place.plot(
            at,
            1e3 * line["seconds"],
            style,
            marker="o",
            markersize=4,
            label=str(candidate),
        )
        place.fill_between(
            at,
            1e3 * line["low_s"],
            1e3 * line["high_s"],
            color=drawn.get_color(),
            alpha=0.2,
            linewidth=0,
        )
    place.spines[["top", "right"]].set_visible(False)
    if axis is not None:
        labels = [axis_value(axis, value) for value in values]
        place.set_xticks(range(len(values)), labels, fontsize=8, rotation=20)
        place.set_xlabel(axis_head(axis))
