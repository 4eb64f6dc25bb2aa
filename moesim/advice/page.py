"""Advice as one HTML page: the command line, speed over layers with its band and
measured points, memory and cliff, terms, changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from moesim.advice.plan.commands import server_command
from moesim.advice.text import (
    bound_words,
    grade_words,
    interval_words,
    memory_words,
    model_words,
    row_lines,
    setting_rows,
    speed_words,
    term_rows,
    tie_lines,
    what_if_rows,
)
from moesim.advice.times.latents import NINETY
from moesim.reporting.pages import PageTable, page_figure, page_origin, write_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from moesim.advice.advise import Advice
    from moesim.advice.measured.scores import Prediction
    from moesim.advice.times.latents import Interval


def write_advice(advice: Advice, path: Path, command: str | None = None) -> Path:
    """Write the page; return its path.

    Args:
        advice: what it shows.
        path: of the page.
        command: the command line that made it; None for a call from Python.
    """
    # matplotlib takes a second to import, which only pages should.
    from moesim.advice.page import (  # noqa: PLC0415 - as said above
        memory_chart,
        speed_chart,
    )

    best = advice.best
    # A machine without a card has no such curve.
    speed = None
    if advice.curve:
        label = "Speed over the number of layers on the CPU, with 90 % bands"
        speed = page_figure(speed_chart(advice), label)
    memory = page_figure(memory_chart(advice), "Memory of the advised setting")
    return write_page(
        path,
        "advice.html",
        title=f"{advice.model.name} on {advice.machine.name}",
        origin=page_origin(command),
        model=model_words(advice.model),
        machine=advice.machine.name + memory_words(advice.machine),
        grade=grade_words(advice),
        assumed=advice.machine.assumed,
        command=server_command(
            best.candidate.setting, advice.model, advice.machine, advice.job
        ),
        decode=speed_words(best.decode),
        prefill=speed_words(best.prefill),
        job=interval_words(best.job, "s"),
        bound=bound_words(advice),
        speed=speed,
        memory=memory,
        settings=_table(setting_rows(advice)),
        terms=_table(term_rows(best)),
        what_ifs=_table(what_if_rows(advice)),
        notes=tie_lines(advice),
        rows=row_lines(advice),
        questions=advice.questions,
    )


def _table(rows: Sequence[Sequence[str]]) -> PageTable:
    return PageTable(rows[0], rows[1:])


MOST_POINTS = 400
BAND = "#9ecae1"
LINE = "#2171b5"
POINT = "#cb181d"
GIB = 1024**3


def speed_chart(advice: Advice) -> Figure:
    """Draw decode and prompt speed over layers on the CPU, with 90 % bands, measured
    points and the cliff.
    """
    figure = Figure(figsize=(7, 6), layout="constrained")
    decode, prefill = figure.subplots(2, 1, sharex=True)
    counts = [point.cpu_layers for point in advice.curve]
    chosen = advice.best.candidate.setting
    _band(decode, counts, [point.decode for point in advice.curve])
    _band(prefill, counts, [point.prefill for point in advice.curve])

    for row in advice.observed.used:
        axes = decode if row.row.kind == "decode" else prefill
        place = row.target.setting.cpu_layers
        # The curve ends at the last layer; measured rows may name a larger number.
        # A prompt measured at another micro-batch does not lie on this curve: hollow.
        size = row.target.setting.micro_batch
        same = row.row.kind == "decode" or size == chosen.micro_batch
        fill = POINT if same else "none"
        speed = row.row.tokens_per_s
        axes.plot(min(place, counts[-1]), speed, "o", color=POINT, markerfacecolor=fill)
    for axes in (decode, prefill):
        _shade_cliff(axes, advice)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    decode.set_ylabel("decode, tokens/s")
    prefill.set_ylabel("prompt, tokens/s")
    prefill.set_xlabel("layers with experts on the CPU (--n-cpu-moe)")
    return figure


def _band(axes: Axes, counts: Sequence[int], speeds: Sequence[Interval]) -> None:
    low = [speed.low for speed in speeds]
    high = [speed.high for speed in speeds]
    axes.fill_between(counts, low, high, color=BAND, alpha=0.6, linewidth=0)
    axes.plot(counts, [speed.value for speed in speeds], color=LINE)


def _shade_cliff(axes: Axes, advice: Advice) -> None:
    """Shade settings that do not fit: beyond the cliff no speed holds."""
    beyond = [point.cpu_layers for point in advice.curve if not point.fits]
    if beyond:
        left, right = min(beyond) - 0.5, max(beyond) + 0.5
        # See-through, so that words on it can be read on any paper.
        axes.axvspan(left, right, color=POINT, alpha=0.12, lw=0, zorder=0)
        axes.text(
            min(beyond), 0.03, "does not fit", transform=axes.get_xaxis_transform()
        )


def memory_chart(advice: Advice) -> Figure:
    """Draw what the advised setting puts into either memory, beside what is free."""
    bill = advice.best.candidate.bill
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    axes = figure.add_subplot()
    rows = [("host memory", bill.host, bill.host_free)]
    if advice.machine.graphics:
        rows.append(("graphics memory", bill.gpu, bill.gpu_free))

    # One colour per item in both memories.
    items = list(dict.fromkeys(name for _, parts, _ in rows for name in parts))
    for place, (_, parts, free) in enumerate(rows):
        left = 0.0
        # Items of no width keep their colour, so that the legend is whole.
        for name in items:
            width = parts.get(name, 0.0) / GIB
            axes.barh(place, width, left=left, color=f"C{items.index(name)}")
            left += width
        if free:
            axes.plot([free / GIB] * 2, [place - 0.4, place + 0.4], color=POINT)
    for name in items:
        axes.barh(0, 0, color=f"C{items.index(name)}", label=name)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlabel("GiB; the red line is what programs may use")
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        fontsize="small",
        frameon=False,
    )
    return figure


def scatter(predictions: Sequence[Prediction]) -> Figure:
    """Draw predicted over measured tokens/s, intervals as vertical bars."""
    # Thousands of pairs hide each other; every n-th shows the same picture.
    stride = max(1, len(predictions) // MOST_POINTS)
    shown = predictions[::stride]
    measured = [each.run.tokens_per_s for each in shown]
    predicted = [each.run.tokens_per_s * (1 + each.error("moesim")) for each in shown]
    ends = [math.exp(NINETY * each.guesses["moesim"].spread) for each in shown]
    below = [value - value / end for value, end in zip(predicted, ends, strict=True)]
    above = [value * end - value for value, end in zip(predicted, ends, strict=True)]

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(
        measured,
        predicted,
        yerr=[below, above],
        fmt=".",
        color=LINE,
        ecolor=BAND,
        elinewidth=0.8,
        markersize=4,
    )
    range_ends = [min(measured + predicted), max(measured + predicted)]
    axes.plot(range_ends, range_ends, color="#555", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured tokens/s")
    axes.set_ylabel("predicted tokens/s")
    return figure
