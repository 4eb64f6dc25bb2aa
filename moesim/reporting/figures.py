"""Runs as pictures: policies beside each other, where experts were computed, what the
lanes did in one step.

Each function draws into a figure of its own and returns it: notebooks show it, `save`
writes it, `svg` puts it into a page. No window is opened and no global state of
matplotlib is touched.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.base import PolicyError
from moesim.reporting.text import ms, number, percent, shared_words
from moesim.traces.files import written_beside
from moesim.traces.sizes import format_bytes
from moesim.traces.timeline.spans import KIND_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pandas as pd
    from matplotlib.figure import Figure

    from moesim.runs.result import Run

STRONG = "#2f6690"
QUIET = "#9bb1bd"
KINDS = {
    "dense": "#9bb1bd",
    "plan": "#555555",
    "compute": "#2f6690",
    "fetch": "#d1774c",
    "prefetch": "#e8b04a",
    "replace": "#b0567f",
    "read": "#7a9e5a",
    "activation": "#c9c9c9",
    "join": "#dddddd",
}
"""Colours of the kinds of operations."""
NAMED_SPANS = 80
"""With more operations in a picture there is no room for the experts' numbers."""
SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width: float = 8.4, height: float = 3.6) -> Figure:
    """An empty figure that belongs to nobody else."""
    from matplotlib.backends.backend_agg import (  # noqa: PLC0415 - half a second, for pictures only
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF by the end of its name; PNG where it has none
    of these.
    """
    path = Path(path)
    form = path.suffix[1:] if path.suffix in SUFFIXES else "png"
    with written_beside(path) as part:
        figure.savefig(part, format=form, dpi=120)
    return path


def svg(figure: Figure) -> str:
    """A figure as an SVG element, the same bytes every time."""
    from matplotlib import rc_context  # noqa: PLC0415

    out = io.StringIO()
    with rc_context({"svg.hashsalt": "moesim"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def comparison_figure(table: pd.DataFrame, runs: Mapping[str, Run]) -> Figure:
    """Draw a comparison as three rows of bars that share their policies: speed, hit
    rate, bytes.
    """
    phase = "decode" if table["decode_tokens_per_s"].notna().any() else "prefill"
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
    for axis, (column, title, words, colour) in zip(axes, panels, strict=True):
        values = column.astype(float).fillna(0.0)
        bars = axis.barh(range(len(values)), values, color=colour, height=0.65)
        axis.bar_label(bars, [words(value) for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(x=0.18)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    axes[0].set_yticks(range(len(table)), table["policy"])
    axes[0].invert_yaxis()
    figure.suptitle(
        shared_words(runs).replace("\n", "; "), fontsize=9, x=0.01, ha="left"
    )
    return figure


def placement_figure(run: Run) -> Figure:
    """Draw which expert was computed where: a cell per expert, a row per layer, busiest
    experts to the left.

    Blue was computed on a GPU, red on the CPU, pale in between; white was never asked
    for.
    """
    placed = run.placement()
    shape = (
        placed["layer"].max() + 1 if len(placed) else 0,
        placed["expert"].max() + 1 if len(placed) else 0,
    )
    uses = np.zeros(shape)
    on_gpu = np.full(shape, np.nan)
    uses[placed["layer"], placed["expert"]] = placed["uses"]
    on_gpu[placed["layer"], placed["expert"]] = placed["on_gpu"]
    order = np.argsort(-uses, axis=1, kind="stable")
    figure = new_figure(9, 3.8)
    axis = figure.subplots()
    picture = axis.imshow(
        np.take_along_axis(on_gpu, order, axis=1),
        cmap="RdYlBu",
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    figure.colorbar(picture, ax=axis, label="share of its uses on a GPU")
    axis.set(xlabel="experts of a layer, busiest first", ylabel="layer")
    return figure


def step_figure(run: Run, step: int | None = None, layers: int = 4) -> Figure:
    """Draw what every lane did in the first layers of one forward pass, with the
    numbers of the experts it was for.

    Args:
        step: the forward pass; None takes the decode step in the middle of the run.
        layers: how many MoE layers from the first on.

    Raises:
        PolicyError: no such step.
    """
    steps = run.timeline.step_frame()
    if step is None and len(steps):
        decode = steps[steps["phase"] == "decode"]
        step = int(
            (decode if len(decode) else steps)["step"].iloc[
                (len(decode) or len(steps)) // 2
            ]
        )
    chosen = steps[steps["step"] == step]
    if chosen.empty:
        raise PolicyError(
            f"step: expected one of the run's {len(steps)} forward passes, got {step}"
        )
    spans = run.timeline.frame()
    mine = spans[
        (spans["step"] == step) & (spans["layer"] >= 0) & (spans["layer"] < layers)
    ]
    begin_s = float(chosen["start_s"].iloc[0])
    lanes = [lane for lane in run.timeline.lanes if (mine["lane"] == lane).any()]
    figure = new_figure(10, 0.9 + 0.38 * len(lanes))
    axis = figure.subplots()
    for kind in KIND_NAMES:
        label: str | None = kind
        for place, lane in enumerate(lanes):
            part = mine[(mine["kind"] == kind) & (mine["lane"] == lane)]
            if part.empty:
                continue
            starts_ms = (part["start_s"] - begin_s) * 1e3
            lengths_ms = (part["end_s"] - part["start_s"]) * 1e3
            bars = list(zip(starts_ms, lengths_ms, strict=True))
            axis.broken_barh(
                bars,
                (place - 0.4, 0.8),
                color=KINDS[kind],
                edgecolor="white",
                lw=0.3,
                label=label,
            )
            label = None
            for (start_ms, length_ms), expert in zip(bars, part["expert"], strict=True):
                if expert >= 0 and len(mine) <= NAMED_SPANS:
                    axis.text(
                        start_ms + length_ms / 2,
                        place,
                        str(expert),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white",
                        clip_on=True,
                    )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlabel(
        f"ms since the start of step {step}, of"
        f" {ms(float(chosen['end_s'].iloc[0]) - begin_s)} in all"
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
