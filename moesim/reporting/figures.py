"""Figures, each described once: matplotlib draws them for papers and notebooks, Vega
(`moesim.reporting.interactive`) for pages that answer when touched.

A `Figure` names the columns of a data frame that go onto its axes. `Figure.draw` puts
it onto Axes of yours, or onto new ones, and honours ``rcParams``::

    fig, ax = plt.subplots(figsize=(3.3, 2))
    moesim.answer(frame).figure().draw(ax)

Two styles ship: ``plt.style.use(moesim.style("paper"))``, and ``screen``.
"""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import write_bytes
from moesim.base.options import PICTURES, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes

GPU = "#0072B2"
CPU = "#D55E00"
"""What a GPU or the processor did, in every figure."""

PALETTE = (GPU, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", CPU, "#8C8C00", "#777777")
"""Colours that people who see few of them can tell apart, on light and dark paper.

Source: Okabe & Ito, *Color Universal Design* (2008); yellow darkened, black lightened.
"""
QUIET = "#8fa3ae"
LIMIT = "#CC79A7"
"""What must not be passed, such as free memory."""

DEVICES = (CPU, "#bdbdbd", GPU)
"""From the processor's colour to that of a GPU."""

MARKERS = ("o", "s", "^", "D", "v", "P")
MOST_MARKED = 60
"""Points of a line beyond which they are not marked."""

MOST_PANELS_ABREAST = 3


@dataclass(frozen=True, slots=True)
class Axis:
    """What stands on an axis, or is shown by colour.

    Attributes:
        column: of the frame.
        words: label, with its unit.
        form: of numbers, in Python's words: ``.0%`` for shares.
        log: logarithmic at first.
        zero: begins at zero.
        limits: both ends; None for those of the data.
        order: of names, from the first on; None for numbers.
        integer: whether only whole numbers mean something.
    """

    column: str
    words: str
    form: str = ""
    log: bool = False
    zero: bool = False
    limits: tuple[float, float] | None = None
    order: tuple[str, ...] | None = None
    integer: bool = False


def names(column: str, words: str, values: Iterable[Any]) -> Axis:
    """An axis of names, in the order in which they come first."""
    return Axis(column, words, order=tuple(dict.fromkeys(map(str, values))))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: rows, what they stand for, and how they are marked.

    Attributes:
        rows: a frame with a row for each mark.
        x, y: axes.
        label: what is shown, in a sentence, also for readers who cannot see it.
        mark: ``line``, ``point``, ``bar``, or ``cells`` (coloured by `colour`).
        series: column of names that have a colour each; None for one series.
        colours: by name; others take those of ``axes.prop_cycle`` in their order.
        dashed: names that see the future; points of theirs are hollow.
        low, high: columns with the ends of an interval of `y`, or of `x` where names
            stand on `y`; None for none.
        start: column at which bars that lie begin; None for zero.
        colour: of cells.
        shades: of cells, from the lowest to the highest.
        panel: column of names, each of which gets Axes of its own.
        rules: value and words of straight lines, by ``x`` or ``y``.
        lines: points and words of other lines to compare with.
        text: column of words beside each mark.
        hover: more columns and their words, for pages.
        measures: other axes that a page offers for `y`, or `colour` of cells.
    """

    rows: pd.DataFrame = field(repr=False)
    x: Axis
    y: Axis
    label: str
    mark: str = "line"
    series: str | None = None
    colours: Mapping[str, str] = field(default_factory=dict)
    dashed: frozenset[str] = frozenset()
    low: str | None = None
    high: str | None = None
    start: str | None = None
    colour: Axis | None = None
    shades: tuple[str, ...] = DEVICES
    panel: str | None = None
    rules: Sequence[tuple[str, float, str]] = ()
    lines: Sequence[tuple[Sequence[float], Sequence[float], str]] = ()
    text: str | None = None
    hover: Sequence[tuple[str, str, str]] = ()
    measures: Sequence[Axis] = ()

    @property
    def side(self) -> str:
        """Which field is measured: colour, or an axis of numbers."""
        return "colour" if self.colour else "y" if self.y.order is None else "x"

    @property
    def measured(self) -> Axis:
        """What is measured."""
        axis: Axis = getattr(self, self.side)
        return axis

    @property
    def lies(self) -> bool:
        """Whether it is measured from left to right, a name in each row."""
        return self.y.order is not None

    @property
    def is_marked(self) -> bool:
        """Whether series can be told apart by their points."""
        few = len(self.rows) <= MOST_MARKED * max(1, len(self.names()))
        return self.mark == "point" or (self.mark == "line" and few)

    def names(self) -> list[str]:
        """Names of the series: the same ones have the same looks in any order."""
        if self.series is None:
            return []
        series = set(self.rows[self.series].astype(str)) | set(self.colours)
        # 4 tokens come before 16.
        return sorted(series, key=lambda name: [
            part.zfill(9) if part.isdigit() else part
            for part in re.split(r"(\d+)", name)
        ])  # fmt: skip

    def panels(self) -> list[tuple[str, Figure]]:
        """A figure for each panel, with its name."""
        if self.panel is None:
            return [("", self)]
        groups = self.rows.groupby(self.panel, sort=False)
        return [(str(name), replace(self, rows=rows)) for name, rows in groups]

    def draw(self, ax: Any = None) -> Any:
        """Draw it.

        Args:
            ax: Axes of matplotlib, or as many as there are panels; None makes some.

        Returns:
            The Axes; an array of them where there are several panels.

        Raises:
            ConfigError: another number of Axes than of panels.
        """
        panels = self.panels()
        if ax is None:
            import matplotlib.pyplot as plt  # noqa: PLC0415 - half a second

            size = self.size_inches()
            axes = self.new_axes(plt.figure(figsize=size, layout="constrained"))
        else:
            axes = list(np.atleast_1d(np.asarray(ax, object)).ravel())
        if len(axes) != len(panels):
            raise ConfigError(
                f"ax: expected {len(panels)} Axes, one for each panel, got {len(axes)}"
            )
        if not all(hasattr(each, "barh") for each in axes):
            raise ConfigError(f"ax: expected Axes of matplotlib, got {ax!r}")
        for each, (name, panel) in zip(axes, panels, strict=True):
            _draw(panel, each, self.names())
            if name:
                each.set_title(name)
        # Axes may share limits, which hold the marks of all of them.
        for each in axes:
            _dress(each.xaxis, self.x, narrow=len(panels) > 1)
            _dress(each.yaxis, self.y)
            if self.y.order is not None:
                each.set_ylim(len(self.y.order) - 0.5, -0.5)
        _explain(self, axes)
        return axes[0] if self.panel is None else np.array(axes, object)

    def size_inches(self) -> tuple[float, float]:
        """That of ``rcParams``, higher for many names and wider for many panels."""
        from matplotlib import rcParams  # noqa: PLC0415 - as in `draw`

        width, height = rcParams["figure.figsize"]
        if self.lies:
            lines = max(2 + len(self.y.order or ()), 1.5 * len(self.names()))
            height = max(0.4 * height, 0.8 + 0.03 * height * lines)
        if (count := len(self.panels())) > 1:
            across = min(count, MOST_PANELS_ABREAST)
            return 0.55 * width * across, 0.8 * height * -(-count // across)
        return width, height

    def save(self, path: str | Path) -> Path:
        """Write a picture in the style of screens; the same bytes every time.

        Raises:
            ConfigError: the name ends neither in .png nor .pdf nor .svg.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in PICTURES:
            raise ConfigError(
                f"{path}: expected a name that ends in {', '.join(PICTURES)}"
            )
        # No pyplot: its state is the caller's.
        from matplotlib import figure as canvas  # noqa: PLC0415 - as in `draw`
        from matplotlib import style as styles  # noqa: PLC0415 - as in `draw`

        buffer = io.BytesIO()
        dateless = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        with styles.context(style("screen"), after_reset=True):
            picture = canvas.Figure(figsize=self.size_inches())
            axes = self.new_axes(picture)
            self.draw(axes)
            picture.savefig(buffer, format=kind[1:], metadata=dateless.get(kind))
        write_bytes(path, buffer.getvalue())
        return path

    def new_axes(self, picture: Any) -> list[Axes]:
        """One for each panel, in a figure of matplotlib."""
        count = len(self.panels())
        across = min(count, MOST_PANELS_ABREAST)
        grid = picture.subplots(-(-count // across), across, squeeze=False, sharey=True)
        for spare in grid.ravel()[count:]:
            spare.remove()
        return list(grid.ravel()[:count])


def style(name: str) -> str:
    """Path of a style that ships, for ``plt.style.use``: ``screen``, or ``paper`` for
    columns of 3.3 inches.

    Raises:
        ConfigError: no such style.
    """
    path = Path(__file__).parent / "styles" / f"{name}.mplstyle"
    if not path.is_file():
        known = sorted(each.stem for each in path.parent.glob("*.mplstyle"))
        raise ConfigError(f"style: expected one of {', '.join(known)}, got {name!r}")
    return str(path)


# With matplotlib.


def _draw(figure: Figure, ax: Axes, known: Sequence[str]) -> None:
    """Draw one panel."""
    from matplotlib import rcParams  # noqa: PLC0415 - as in `draw`

    # Named now: a name such as C0 means what the style of its last reader says.
    cycle = rcParams["axes.prop_cycle"].by_key().get("color", list(PALETTE))
    series: Iterable[tuple[Any, pd.DataFrame]] = [(None, figure.rows)]
    if figure.mark == "cells":
        series = []
        _draw_cells(figure, ax)
    elif figure.series is not None:
        series = figure.rows.groupby(figure.series, sort=False)
    for name, rows in series:
        place = 0 if name is None else known.index(str(name))
        colour = figure.colours.get(str(name), cycle[place % len(cycle)])
        looks: dict[str, Any] = {} if name is None else {"label": str(name)}
        if figure.is_marked and name is not None:
            looks["marker"] = MARKERS[place % len(MARKERS)]
        _draw_series(figure, ax, rows, colour, looks)
    for side, value, words in figure.rules:
        line = ax.axhline if side == "y" else ax.axvline
        line(value, color=QUIET, linestyle="--", linewidth=1, label=words, zorder=0)
    for across, up, words in figure.lines:
        ax.plot(across, up, color=QUIET, linewidth=1, label=words, zorder=0)


def _explain(figure: Figure, axes: Sequence[Axes]) -> None:
    """Name the colours: in the first panel, or beside the last."""
    labels = axes[0].get_legend_handles_labels()[1]
    # Bars that lie leave a legend no room.
    most = 9 if not figure.lies else len(figure.y.order or ())
    if len(labels) > most:
        axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    elif labels:
        axes[0].legend()


def _draw_series(
    figure: Figure, ax: Axes, rows: pd.DataFrame, colour: str, looks: dict[str, Any]
) -> None:
    x = _places(figure.x, rows)
    y = _places(figure.y, rows)
    lies = figure.lies
    foresees = looks.get("label") in figure.dashed
    if figure.mark == "bar" and lies:
        begin = 0.0 if figure.start is None else rows[figure.start].to_numpy(float)
        ax.barh(y, x - begin, left=begin, color=colour, **looks)
    elif figure.mark == "bar":
        ax.bar(x, y, color=colour, **looks)
    elif figure.mark == "line":
        ax.plot(x, y, color=colour, linestyle="--" if foresees else None, **looks)
    else:
        face = "none" if foresees else colour
        ax.scatter(x, y, facecolors=face, edgecolors=colour, **looks)
    if figure.low is not None:
        low, high = rows[[figure.low, figure.high]].to_numpy(float).T
        ink = "black" if figure.mark == "bar" else colour
        lines, at = (ax.hlines, y) if lies else (ax.vlines, x)
        lines(at, low, high, color=ink, linewidth=1, zorder=3)
        x = np.fmax(x, high) if lies else x
    if figure.text is not None:
        for across, down, words in zip(x, y, rows[figure.text], strict=True):
            ax.annotate(
                str(words), (across, down), xytext=(4, 0 if lies else 4),
                textcoords="offset points", va="center" if lies else "bottom",
                ha="left", fontsize="small",
            )  # fmt: skip


def _draw_cells(figure: Figure, ax: Axes) -> None:
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - as in `draw`

    shade = figure.measured
    table = figure.rows.pivot_table(
        index=figure.y.column, columns=figure.x.column, values=shade.column
    )
    across, down = (side.to_numpy(int) for side in (table.columns, table.index))
    colours = LinearSegmentedColormap.from_list("cells", list(figure.shades))
    low, high = shade.limits or (None, None)
    picture = ax.pcolormesh(
        across, down, table.to_numpy(float), shading="nearest", cmap=colours,
        vmin=low, vmax=high, rasterized=True,
    )  # fmt: skip
    ax.grid(visible=False)
    ax.invert_yaxis()
    bar = ax.figure.colorbar(picture, ax=ax, label=shade.words)
    if shade.form:
        bar.ax.yaxis.set_major_formatter(_formatted(shade.form))


def _formatted(form: str) -> Callable[[float, float], str]:
    """What writes numbers beside ticks, per cent as in tables."""
    return lambda value, _: format(value, form).replace("%", " %")


def _places(axis: Axis, rows: pd.DataFrame) -> np.ndarray:
    """Numbers of a column; those of names are their places in the order."""
    if axis.order is None:
        return rows[axis.column].to_numpy(float)
    return rows[axis.column].astype(str).map(axis.order.index).to_numpy(float)


def _dress(side: Any, axis: Axis, *, narrow: bool = False) -> None:
    """Labels, limits and scale of one side; long labels wrap where it is narrow."""
    ax, name = side.axes, side.axis_name
    words = textwrap.fill(axis.words, 24) if narrow else axis.words
    ax.set(**{f"{name}label": words})
    if axis.order is not None:
        side.set_ticks(range(len(axis.order)), labels=axis.order)
        if name == "x" and sum(map(len, axis.order)) > 40:
            side.set_tick_params(rotation=20)
        return
    if axis.log:
        ax.set(**{f"{name}scale": "log"})
    if axis.form:
        side.set_major_formatter(_formatted(axis.form))
    if axis.integer and not axis.log:
        side.get_major_locator().set_params(integer=True)
    if axis.limits is not None:
        ax.set(**{f"{name}lim": axis.limits})
    elif axis.zero and not axis.log:
        ax.set(**{f"{name}lim": (0, None)})
