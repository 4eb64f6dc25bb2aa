"""Runs as figures: policies side by side, where experts were computed, what the lanes
did in one step.

Each function draws into a figure of its own and returns it: notebooks show it, `save`
writes it, `svg` puts it into a page. No window is opened, and no global state of
matplotlib is touched.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PolicyError
from moesim.reporting.text import shared_setting
from moesim.reporting.units import ms, number, percent
from moesim.traces.files import written_beside
from moesim.traces.sizes import format_bytes
from moesim.traces.timeline.spans import KIND_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from moesim.runs.result import Run

STRONG = "#3a7ca5"
QUIET = "#9bb1bd"
KINDS = {
    "dense": "#9bb1bd",
    "plan": "#757575",
    "compute": "#3a7ca5",
    "fetch": "#d1774c",
    "prefetch": "#e8b04a",
    "replace": "#b0567f",
    "read": "#7a9e5a",
    "activation": "#c9c9c9",
    "join": "#dddddd",
}
"""Colours of the kinds of operations."""
MOST_LABELLED = 80
"""With more operations in a figure their experts' numbers would overlap."""
SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width: float = 8.4, height: float = 3.6) -> Figure:
    """An empty figure that no window and no global state knows. Sizes in inches."""
    # matplotlib takes half a second to import, which only figures should cost.
    from matplotlib.backends.backend_agg import (  # noqa: PLC0415 - as said above
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # noqa: PLC0415 - as said above

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the end of its name; PNG by default."""
    path = Path(path)
    file_format = path.suffix[1:] if path.suffix in SUFFIXES else "png"
    with written_beside(path) as part:
        figure.savefig(part, format=file_format, dpi=120)
    return path


def svg(figure: Figure, title: str) -> str:
    """A figure as an SVG element of a page, the same bytes every time.

    Words stay text, which can be searched and copied. Black becomes the colour of the
    page's text, and the paper is the page's own, so that dark screens stay dark.

    Args:
        figure: what to draw.
        title: what it shows, for readers who cannot see it.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - see `new_figure`

    out = io.StringIO()
    # Without a fixed salt and date two pages of one run would differ.
    with rc_context({"svg.hashsalt": "moesim", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Title": title}
        figure.savefig(out, format="svg", metadata=metadata, transparent=True)

    # A page has no use for the XML declaration and document type.
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    # Every figure numbers its parts from one; a page holds several figures.
    prefix = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", '<svg role="img" ', 1)


def comparison_figure(table: pd.DataFrame, runs: Mapping[str, Run]) -> Figure:
    """Draw a comparison as three rows of bars that share their policies: speed, hit
    rate, bytes.
    """
    has_decode = table["decode_tokens_per_s"].notna().any()
    phase = "decode" if has_decode else "prefill"
    panels: tuple[tuple[pd.Series, str, Callable[[float], str], str], ...] = (
        (table[f"{phase}_tokens_per_s"], f"{phase}, tokens/s", number, STRONG),
        (table["hit_rate_active"], "hit rate of active experts", percent, QUIET),
        (
            table["h2d_bytes"] + table["ssd_bytes"],
            "copied to the GPU and read from SSD",
            format_bytes,
            QUIET,
        ),
    )
    figure = new_figure(11, 1.4 + 0.42 * len(table))
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (column, title, label, colour) in zip(axes, panels, strict=True):
        values = column.astype(float).fillna(0.0)
        bars = axis.barh(range(len(values)), values, color=colour, height=0.65)
        axis.bar_label(bars, [label(value) for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        # Room for the label of the longest bar.
        axis.margins(x=0.18)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)

    axes[0].set_yticks(range(len(table)), table["policy"])
    # From top to bottom in the order of the table, fastest first.
    axes[0].invert_yaxis()
    setting = shared_setting(runs).replace("\n", "; ")
    # A figure travels without its table, so it says what was compared.
    figure.suptitle(setting, fontsize=9, x=0.01, ha="left")
    return figure


def placement_figure(run: Run) -> Figure:
    """Draw which expert was computed where: a cell per expert, a row per layer, busiest
    experts to the left.

    Blue was computed on a GPU, red on the CPU, pale in between; white was never asked
    for.
    """
    placement = run.placement()
    layers = placement["layer"].max() + 1 if len(placement) else 0
    experts = placement["expert"].max() + 1 if len(placement) else 0
    uses = np.zeros((layers, experts))
    # What stays NaN is drawn white.
    on_gpu = np.full((layers, experts), np.nan)
    uses[placement["layer"], placement["expert"]] = placement["uses"]
    on_gpu[placement["layer"], placement["expert"]] = placement["on_gpu"]
    # By id the map would be noise: busy experts are spread over all ids.
    busiest_first = np.argsort(-uses, axis=1, kind="stable")

    figure = new_figure(9, 3.8)
    axis = figure.subplots()
    image = axis.imshow(
        np.take_along_axis(on_gpu, busiest_first, axis=1),
        cmap="RdYlBu",
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    figure.colorbar(image, ax=axis, label="share of its uses on a GPU")
    axis.set(xlabel="experts of a layer, busiest first", ylabel="layer")
    return figure


def step_figure(run: Run, step: int | None = None, layers: int = 4) -> Figure:
    """Draw what every lane did in the first layers of one forward pass, with the
    numbers of the experts it was for.

    Args:
        run: with its timeline.
        step: the forward pass; None takes the decode step in the middle of the run.
        layers: how many MoE layers from the first on.

    Raises:
        PolicyError: no such step.
    """
    steps = run.timeline.step_frame()
    if step is None and len(steps):
        step = _middle_step(steps)
    rows = steps[steps["step"] == step]
    if rows.empty:
        raise PolicyError(
            f"step: expected one of the run's {len(steps)} forward passes, got {step}"
        )
    begin_s = float(rows["start_s"].iloc[0])
    end_s = float(rows["end_s"].iloc[0])

    spans = run.timeline.frame()
    # Layer -1 is what follows the last layer, the output head.
    in_layers = (spans["layer"] >= 0) & (spans["layer"] < layers)
    spans = spans[(spans["step"] == step) & in_layers]
    lanes = [lane for lane in run.timeline.lanes if (spans["lane"] == lane).any()]

    figure = new_figure(10, 0.9 + 0.38 * len(lanes))
    axis = figure.subplots()
    for kind in KIND_NAMES:
        _draw_kind(axis, spans, kind, lanes, begin_s)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlabel(
        f"ms since the start of step {step}, of {ms(end_s - begin_s)} in all"
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(
        ncols=len(KIND_NAMES),
        frameon=False,
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
    )
    return figure


def _middle_step(steps: pd.DataFrame) -> int:
    """The decode step in the middle; a prefill step where nothing is generated."""
    decode = steps[steps["phase"] == "decode"]
    candidates = decode if len(decode) else steps
    return int(candidates["step"].iloc[len(candidates) // 2])


def _draw_kind(
    axis: Axes, spans: pd.DataFrame, kind: str, lanes: list[str], begin_s: float
) -> None:
    """Draw the operations of one kind on all lanes."""
    # One entry in the legend, however many lanes show this kind.
    label: str | None = kind
    for row, lane in enumerate(lanes):
        of_lane = spans[(spans["kind"] == kind) & (spans["lane"] == lane)]
        if of_lane.empty:
            continue
        starts_ms = (of_lane["start_s"] - begin_s) * 1e3
        lengths_ms = (of_lane["end_s"] - of_lane["start_s"]) * 1e3
        bars = list(zip(starts_ms, lengths_ms, strict=True))
        axis.broken_barh(
            bars,
            (row - 0.4, 0.8),
            color=KINDS[kind],
            # Operations follow each other without a gap; an edge keeps them apart.
            edgecolor="white",
            lw=0.3,
            label=label,
        )
        label = None
        if len(spans) > MOST_LABELLED:
            continue
        for (start_ms, length_ms), expert in zip(bars, of_lane["expert"], strict=True):
            # -1 stands for no expert, as in the dense part.
            if expert < 0:
                continue
            axis.text(
                start_ms + length_ms / 2,
                row,
                str(expert),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
                clip_on=True,
            )
