"""A comparison over several machines or memories as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.reporting.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moesim.sweeps.comparison import Comparison

MEMORY_LABELS = {
    "gpu_memory_bytes": "GPU memory",
    "slots_per_layer": "cache slots per layer",
    "cache_ratio": "GPU cache, share of all experts",
}
"""By the way in which sizes were stated: label of their axis."""
MOST_PANELS_ABREAST = 3


def cells_figure(compared: Comparison) -> Figure:
    """Draw the time of the whole trace over memory: a line per policy, a panel per
    machine. It is the measure by which winners are named.

    Policies that see the future are dashed. With one memory size only, machines stand
    on the axis.
    """
    machines = list(compared.table["hw"].unique())
    memories = list(compared.table["memory"].unique())
    over_machines = len(memories) == 1
    axis_column = "hw" if over_machines else "memory"
    panel_column = "memory" if over_machines else "hw"
    ticks = machines if over_machines else memories
    positions = list(range(len(machines))) if over_machines else _sizes(compared)

    # One limit for all: panels that share an axis would keep that of the first.
    longest_s = float(compared.table["makespan_s"].max())
    panels = [panel for _, panel in compared.table.groupby(panel_column, sort=False)]
    columns = min(MOST_PANELS_ABREAST, len(panels))
    rows = -(-len(panels) // columns)  # rounded up
    figure = new_figure(2.2 + 3.6 * columns, 0.6 + 3.0 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        for policy in compared.by_policy():
            of_policy = panel[panel["policy"] == policy].set_index(axis_column)
            times_s = of_policy["makespan_s"].reindex(ticks)
            axis.plot(
                positions,
                times_s,
                "--" if of_policy["oracle"].any() else "-",
                marker="o",
                markersize=4,
                label=policy,
            )
        _finish_axis(axis, str(panel[panel_column].iloc[0]), longest_s)
        if over_machines:
            axis.set_xticks(positions, ticks, rotation=20, ha="right")
        else:
            axis.set_xticks(positions, ticks, fontsize=8)
            axis.set_xlabel(MEMORY_LABELS[compared.axis])

    # The last row of the grid may have places without a panel.
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("s, whole trace")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    return figure


def _finish_axis(axis: Axes, title: str, longest_s: float) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    # From zero, so that heights can be compared.
    axis.set_ylim(0, 1.05 * longest_s or 1.0)
    axis.spines[["top", "right"]].set_visible(False)


def _sizes(compared: Comparison) -> list[float]:
    """Memory sizes as numbers, in the unit in which they were stated."""
    return [options.size[1] for options in compared.memories.values()]
