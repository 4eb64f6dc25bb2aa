"""Figures that answer when touched: the descriptions of `moesim.reporting.figures`
through Altair, for pages.

Hovering shows values, a click on a name in the legend hides it, and a figure follows
the choices of its page. Altair writes the description only; ``vl-convert`` brings
Vega's script, which pages carry.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from moesim.base.files import user_folder, write_text
from moesim.reporting.figures import MOST_PANELS_ABREAST, PALETTE, QUIET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.reporting.figures import Axis, Figure
    from moesim.reporting.parts import Shown, Spans

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
WIDTH = 760
HEIGHT = 280
NUMBERS = {
    "decimal": ".", "thousands": ",", "grouping": [3], "currency": ["", ""],
    "percent": " %",
}  # fmt: skip
"""How D3 writes numbers: per cent as in tables."""

VERSION = "6.4"
"""Of Vega-Lite."""


class Chart(NamedTuple):
    """A figure for a page.

    Attributes:
        spec: Vega-Lite, without data.
        data: columns by name, for each data source that `spec` names.
        label: what it shows, in a sentence.
        measures: columns and words that a reader can put onto the axis, the one that is
            there first.
        can_log: whether that axis can be logarithmic.
    """

    spec: Spec
    data: Mapping[str, Columns]
    label: str
    measures: Mapping[str, str] = {}
    can_log: bool = False


def columns_of(frame: pd.DataFrame) -> Columns:
    """A data frame as columns of what JSON can say."""
    frame = frame.replace([np.inf, -np.inf], np.nan)
    columns = frame.astype(object).where(frame.notna(), None)
    return {str(name): columns[name].tolist() for name in frame}


def interactive(shown: Shown) -> Chart:
    """Put a figure onto a page."""
    figure, where, explores = shown
    base: Any = alt.Chart(alt.NamedData("rows"))
    for column, choice in where.items():
        test = f"{choice.name} == 'all' || datum['{column}'] + '' == {choice.name}"
        base = base.transform_filter(test)
    layers = _layers(figure, base, {"cursor": "pointer"} if explores else {})
    if figure.series is not None and figure.mark != "cells":
        hidden = alt.selection_point(
            name="hidden", fields=[figure.series], bind="legend", toggle="true",
            empty=False,
        )  # fmt: skip
        layers = [layer.transform_filter(~hidden) for layer in layers]
        # One layer carries it: a name may stand in a chart once.
        layers[-1] = layers[-1].add_params(hidden)
    if explores:
        layers[0] = layers[0].add_params(_dragged("zoom", ["x", "y"]))
        layers.append(_front(figure, base))
    for side, value, words in figure.rules:
        rule = alt.Chart(alt.NamedData("one")).mark_rule(strokeDash=[4, 3], color=QUIET)
        hover = alt.value(f"{words}: {value:.4g}")
        layers.append(rule.encode(**{side: alt.datum(value)}, tooltip=hover))
    data = {"rows": columns_of(_used(shown)), "one": {"at": [0]}}
    if figure.lines:
        lines = [
            pd.DataFrame({"x": across, "y": up, "words": words})
            for across, up, words in figure.lines
        ]
        data["lines"] = columns_of(pd.concat(lines))
        line = alt.Chart(alt.NamedData("lines")).mark_line(color=QUIET, strokeWidth=1)
        x, y = _side(figure.x, alt.X, "x"), _side(figure.y, alt.Y, "y")
        layers.append(line.encode(x=x, y=y, detail="words:N", tooltip="words:N"))
    chart = alt.layer(*layers)
    if len(panels := figure.panels()) > 1:
        order = [name for name, _ in panels]
        facet = alt.Facet(f"{figure.panel}:N", title=None, sort=order)
        chart = chart.properties(width=230, height=200)
        chart = chart.facet(facet=facet, columns=MOST_PANELS_ABREAST)
    else:
        chart = chart.properties(width=WIDTH, height=_height(figure))
    chart = chart.add_params(
        *(alt.param(name=each.name, value=each.value) for each in where.values())
    )
    offered = {axis.column: axis.words for axis in (figure.measured, *figure.measures)}
    can_log = figure.mark in {"line", "point"} and not figure.lies
    return Chart(_spec(chart, figure.label), data, figure.label, offered, can_log)


def _spec(chart: Any, label: str) -> Spec:
    spec: Spec = chart.properties(description=label).to_dict()
    for name in ("$schema", "config", "datasets"):
        spec.pop(name, None)
    return spec


def timeline_chart(spans: Spans) -> Chart:
    """A timeline, whose rows the script of the page puts there as far as they are
    seen.
    """
    words = "ms since the start of the forward pass"
    x = alt.X(
        "start:Q", title=words, axis=alt.Axis(grid=True),
        scale=alt.Scale(domain=[0, 1], nice=False),
    )  # fmt: skip
    lanes = list(spans.lanes)
    y = alt.Y("lane:N", title=None, sort=lanes, scale=alt.Scale(domain=lanes))
    colours = spans.colours
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    legend = alt.Legend(orient="top", columns=5, title=None)
    base = alt.Chart(alt.NamedData("spans")).encode(x=x, y=y, tooltip="lane:N")
    bars = base.mark_bar(clip=True, height={"band": 0.85}).encode(
        x2="end", color=alt.Color("kind:N", scale=scale, legend=legend)
    )
    numbers = (
        base.transform_filter("datum.label != ''")
        .transform_calculate(middle="(datum.start + datum.end) / 2")
        .mark_text(clip=True, color="white", fontSize=10)
        .encode(x="middle:Q", text="label:N")
    )
    moved = _dragged("when", ["x"], clear=False)
    chart = alt.layer(bars.add_params(moved), numbers).properties(
        width=900, height=30 * max(len(lanes), 1)
    )
    if spans.choice is not None:
        chart = chart.add_params(alt.param(name=spans.choice, value=""))
        chart = chart.properties(title=alt.TitleParams(alt.expr(spans.choice)))
    empty: Columns = {name: [] for name in ("lane", "kind", "start", "end", "label")}
    return Chart(_spec(chart, spans.label), {"spans": empty}, spans.label)


def _dragged(name: str, axes: Any, **options: Any) -> Any:
    return alt.selection_interval(
        name=name, encodings=axes, bind="scales",
        zoom="wheel![event.ctrlKey || event.metaKey]", **options,
    )  # fmt: skip


def _height(figure: Figure) -> int:
    if figure.lies:
        return max(60, 28 * len(figure.y.order or ()))
    if figure.mark == "cells":
        return min(max(60, 9 * int(figure.rows[figure.y.column].nunique())), 400)
    return HEIGHT


def _layers(figure: Figure, base: Any, cursor: dict[str, str]) -> list[Any]:
    """The marks of a figure, with intervals below and words above them."""
    if figure.mark == "cells":
        return [_cells(figure, base)]
    placed = base.encode(x=_across(figure), y=_side(figure.y, alt.Y))
    looks = _looks(figure)
    marks = placed.encode(tooltip=_hover(figure), **looks)
    foresees = f"indexof({sorted(figure.dashed)}, datum['{figure.series}']) >= 0"
    if figure.mark == "bar":
        layer = _bars(figure, marks, cursor)
    elif figure.mark == "line":
        points = {"filled": True, "size": 36, **cursor}
        layer = marks.mark_line(point=points if figure.is_marked else False)
        dashes = alt.condition(foresees, alt.value([5, 4]), alt.value([1, 0]))
        layer = layer.encode(strokeDash=dashes)
    else:
        layer = marks.mark_point(size=70, strokeWidth=1.5, **cursor)
        colour = looks.get("color", alt.value(PALETTE[0]))
        filled = alt.condition(foresees, alt.value(0.0), alt.value(0.75))
        layer = layer.encode(fill=colour, fillOpacity=filled)
    layers = [layer]
    if figure.low is not None:
        # A bar would hide half of it.
        place = 1 if figure.mark == "bar" else 0
        layers.insert(place, _interval(figure, base, looks))
    if figure.text is not None:
        above = 8 if figure.mark in {"line", "point"} else 0
        words = placed.mark_text(align="left", dx=4, dy=-above)
        if figure.high is not None and figure.lies:
            end = f"max(datum['{figure.x.column}'], datum['{figure.high}'])"
            words = words.transform_calculate(beyond=end)
            words = words.encode(x=_side(figure.x, alt.X, "beyond"))
        layers.append(words.encode(text=f"{figure.text}:N"))
    return layers


def _bars(figure: Figure, marks: Any, cursor: dict[str, str]) -> Any:
    across = "height" if figure.lies else "width"
    bars = marks.mark_bar(clip=True, **{across: {"band": 0.8}}, **cursor)
    if figure.start is None:
        return bars
    start = _side(figure.x, alt.X, figure.start)
    return bars.encode(x=start, x2=figure.x.column)


def _cells(figure: Figure, base: Any) -> Any:
    """Cells, coloured by a column."""
    shade = figure.measured
    scale = alt.Scale(range=list(figure.shades))
    if shade.limits is not None:
        stops = np.linspace(*shade.limits, len(figure.shades)).tolist()
        scale = alt.Scale(range=list(figure.shades), domain=stops, clamp=True)
    legend = alt.Legend(titleLimit=260, format=shade.form)
    colour = alt.Color(
        f"{shade.column}:Q", title=shade.words, scale=scale, legend=legend
    )
    x, y = _steps(figure.x, alt.X), _steps(figure.y, alt.Y)
    return base.mark_rect().encode(x=x, y=y, color=colour, tooltip=_hover(figure))


def _steps(axis: Axis, channel: Any) -> Any:
    """An axis with a place of its own for each whole number."""
    ticks = alt.Axis(labelOverlap=True, labelAngle=0, ticks=False)
    return channel(f"{axis.column}:O", title=axis.words, axis=ticks)


def _interval(figure: Figure, base: Any, looks: dict[str, Any]) -> Any:
    """A band along lines, a rule through other marks."""
    marks = base.transform_filter(f"isValid(datum['{figure.low}'])")
    marks = marks.mark_area(opacity=0.2) if figure.mark == "line" else marks.mark_rule()
    if figure.mark != "bar" and looks:
        marks = marks.encode(color=looks["color"])
    if not figure.lies:
        low = _side(figure.y, alt.Y, figure.low)
        return marks.encode(x=_across(figure), y=low, y2=figure.high)
    low = _side(figure.x, alt.X, figure.low)
    return marks.encode(x=low, x2=figure.high, y=_side(figure.y, alt.Y))


def _across(figure: Figure) -> Any:
    """The horizontal axis; bars have a place for each whole number."""
    bars = figure.mark == "bar" and figure.x.integer
    return (_steps if bars else _side)(figure.x, alt.X)


def _side(axis: Axis, channel: Any, column: str | None = None) -> Any:
    """An axis of a page's figure; `column` stands there in place of its own."""
    name = column or axis.column
    title = axis.words or None
    if axis.order is not None:
        is_tight = channel is alt.X and len(axis.order) > 4
        labels = alt.Axis(labelLimit=260, labelAngle=-20 if is_tight else alt.Undefined)
        return channel(f"{name}:N", title=title, sort=list(axis.order), axis=labels)
    # Room for marks at the edge, but none below zero.
    scale: dict[str, Any] = {"zero": False, "padding": 8}
    if axis.limits is not None:
        scale = {"domain": list(axis.limits), "nice": False}
    elif axis.log:
        scale = {"type": "log", "padding": 8, "nice": False}
    elif axis.zero:
        scale = {"zero": True}
    ticks = alt.Axis(format=axis.form or alt.Undefined)
    if axis.integer:
        ticks = alt.Axis(tickMinStep=1, format="d")
        # There is no layer before the first one.
        scale |= {"nice": False}
    return channel(f"{name}:Q", title=title, scale=alt.Scale(**scale), axis=ticks)


def _looks(figure: Figure) -> dict[str, Any]:
    """Colour and shape by the names of the series."""
    known = figure.names()
    if not known:
        return {}
    name = f"{figure.series}:N"
    # A band along a line would make the line's symbol as pale as itself.
    legend: Any = alt.Legend(
        orient="top", columns=4, title=None, labelLimit=320, symbolOpacity=1
    )
    if len(known) == 1:
        legend = None
    colours = [
        figure.colours.get(each, PALETTE[place % len(PALETTE)])
        for place, each in enumerate(known)
    ]
    scale = alt.Scale(domain=known, range=colours)
    looks: dict[str, Any] = {"color": alt.Color(name, scale=scale, legend=legend)}
    if figure.is_marked:
        # There may be more names than shapes: Vega begins again.
        scale = alt.Scale(domain=known, range=list(SHAPES))
        looks["shape"] = alt.Shape(name, scale=scale, legend=legend)
    return looks


def _hover(figure: Figure) -> list[Any]:
    """What hovering over a mark says."""
    tips = {}
    if figure.series is not None:
        tips[figure.series] = alt.Tooltip(f"{figure.series}:N")
    for axis in (figure.x, figure.y, figure.colour):
        if axis is None:
            continue
        words = axis.words or axis.column
        tip = alt.Tooltip(f"{axis.column}:N", title=words)
        if axis.order is None:
            form = axis.form or ".4~g"
            tip = alt.Tooltip(f"{axis.column}:Q", title=words, format=form)
        tips[axis.column] = tip
    for name, words, form in figure.hover:
        # An empty format is none.
        kind = "Q" if form else "N"
        tips[name] = alt.Tooltip(
            f"{name}:{kind}", title=words, format=form or alt.Undefined
        )
    return list(tips.values())


def _used(shown: Shown) -> pd.DataFrame:
    """The columns that a figure and its page need."""
    figure = shown.figure
    axes = (figure.x, figure.y, figure.colour, *figure.measures)
    wanted = {axis.column for axis in axes if axis is not None}
    wanted |= {name for name, _, _ in figure.hover} | {*shown.where, "run", "oracle"}
    ends = (figure.low, figure.high, figure.start)
    wanted |= set(filter(None, (figure.series, figure.panel, figure.text, *ends)))
    return figure.rows[[name for name in figure.rows if name in wanted]]


def _front(figure: Figure, base: Any) -> Any:
    """A line along the rows that are better in one axis than all that are better in the
    other.
    """
    x, y = figure.x.column, figure.y.column
    sort = [alt.SortField(x), alt.SortField(y)]
    return (
        base.transform_filter("!datum.oracle")
        .transform_window(least=f"min({y})", sort=sort, frame=[None, 0])
        .transform_filter(f"datum['{y}'] <= datum.least")
        .mark_line(interpolate="step-after", strokeDash=[4, 3], color=QUIET)
        .encode(x=_side(figure.x, alt.X), y=_side(figure.y, alt.Y), order=f"{x}:Q")
    )


def script() -> str:
    """Vega and Vega-Lite for a page; they define ``vegaEmbed``.

    Putting them together takes two seconds, so they are kept in the user's cache
    folder, where there is one.
    """
    name = f"vega-{VERSION}-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return (user_folder("cache") / "pages" / name).read_text(encoding="utf-8")

    import vl_convert  # noqa: PLC0415 - a quarter of a second

    libraries = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VERSION
    )
    # Their names must not meet those of a page.
    text = f"(() => {{{libraries}}})();"
    with suppress(OSError):
        write_text(user_folder("cache") / "pages" / name, text)
    return text


def config(*, dark: bool = False) -> Spec:
    """How figures of pages look, on light or dark paper."""
    ink, quiet = ("#e4e4e4", "#5a5a5a") if dark else ("#222222", "#cccccc")
    words = {"labelColor": ink, "titleColor": ink, "titleFontWeight": "normal"}
    lines = {"domainColor": quiet, "tickColor": quiet, "gridColor": quiet}
    return {
        "background": None,
        "font": "system-ui, Liberation Sans, sans-serif",
        "view": {"stroke": None},
        "axis": {**words, **lines, "gridOpacity": 0.5, "labelFontSize": 11},
        "legend": {**words, "labelFontSize": 11, "symbolLimit": 40},
        "header": {**words, "labelAnchor": "start", "labelFontSize": 12},
        "title": {"color": ink, "anchor": "start", "fontWeight": "normal"},
        "text": {"color": ink},
        "rule": {"color": ink},
        "bar": {"color": PALETTE[0]},
        "line": {"color": PALETTE[0]},
        "point": {"color": PALETTE[0]},
        "range": {"category": list(PALETTE)},
        "locale": {"number": NUMBERS},
    }
