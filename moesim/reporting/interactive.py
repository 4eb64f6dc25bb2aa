"""Figures that answer when touched: the descriptions of `moesim.reporting.figures`
through Altair, for pages.

Hovering shows values, a click on a name in the legend hides it, and a figure follows
the choices of its page. Altair writes the description
only; ``vl-convert`` brings Vega's script, which pages carry.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from moesim.base.files import user_folder, write_text
from moesim.reporting.figures import MOST_PANELS_ABREAST, PALETTE, QUIET
from moesim.reporting.parts import records

if TYPE_CHECKING:
    from moesim.reporting.figures import Axis, Figure
    from moesim.reporting.parts import Shown, Spans

SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
WIDTH = 760
HEIGHT = 280

VERSION = "6.4"
"""Of Vega-Lite."""

CONFIG = {
    "background": None,
    "font": "system-ui, Liberation Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridOpacity": 0.5, "labelFontSize": 11, "titleFontWeight": "normal"},
    "legend": {"labelFontSize": 11, "titleFontWeight": "normal", "symbolLimit": 40},
    "header": {"labelAnchor": "start", "labelFontSize": 12},
    "title": {"anchor": "start", "fontWeight": "normal"},
    "mark": {"color": PALETTE[0]},
    "range": {"category": list(PALETTE)},
    # How D3 writes numbers: per cent as in tables.
    "locale": {
        "number": {
            "decimal": ".",
            "thousands": ",",
            "grouping": [3],
            "currency": ["", ""],
            "percent": " %",
        }
    },
}
"""How figures of pages look; the page's script adds Vega's theme for dark paper."""


def interactive(shown: Shown) -> dict[str, Any]:
    """Put a figure onto a page.

    Returns:
        ``spec``, Vega-Lite; ``data``, rows by the name that `spec` gives them;
        ``label``, what it shows in a sentence; ``measures``, columns and words that a
        reader can put onto the axis, the one that is there first; and ``can_log``,
        whether that axis can be logarithmic.
    """
    figure, where = shown
    base: Any = alt.Chart(alt.NamedData("rows"))
    for column, choice in where.items():
        base = base.transform_filter(f"datum['{column}'] + '' == {choice.name}")
    layers = _layers(figure, base)
    if figure.series is not None and figure.mark != "cells":
        hidden = alt.selection_point(
            name="hidden", fields=[figure.series], bind="legend", toggle="true",
            empty=False,
        )  # fmt: skip
        layers = [layer.transform_filter(~hidden) for layer in layers]
        # One layer carries it: a name may stand in a chart once.
        layers[-1] = layers[-1].add_params(hidden)
    empty = alt.Chart(alt.InlineData(values=[{}]))
    for side, value, words in figure.rules:
        rule = empty.mark_rule(strokeDash=[4, 3], color=QUIET)
        hover = alt.value(f"{words}: {value:.4g}")
        layers.append(rule.encode(**{side: alt.datum(value)}, tooltip=hover))
    for across, up, words in figure.lines:
        points = pd.DataFrame({figure.x.column: across, figure.y.column: up})
        line = alt.Chart(points).mark_line(color=QUIET, strokeWidth=1)
        x, y = _side(figure, figure.x), _side(figure, figure.y)
        layers.append(line.encode(x=x, y=y, tooltip=alt.value(words)))
    chart = alt.layer(*layers)
    if len(panels := figure.panels()) > 1:
        facet = alt.Facet(
            f"{figure.panel}:N", title=None, sort=[name for name, _ in panels]
        )
        chart = chart.properties(width=230, height=200)
        chart = chart.facet(facet=facet, columns=MOST_PANELS_ABREAST)
    else:
        height = 28 * max(2, len(figure.y.order)) if figure.y.order else HEIGHT
        chart = chart.properties(width=WIDTH, height=height)
    chart = chart.add_params(
        *(alt.param(name=each.name, value=each.value) for each in where.values())
    )
    offered = {axis.column: axis.words for axis in (figure.measured, *figure.measures)}
    looks = {"line": "; dashed", "point": "; hollow"}.get(figure.mark)
    label = figure.label
    if looks and figure.dashed:
        label += f"{looks}: sees the future"
    spec = chart.properties(description=label).to_dict()
    words = json.dumps(spec)
    used = [
        name
        for name in figure.rows
        if f'"{name}"' in words or f"['{name}']" in words or name in {*offered, "run"}
    ]
    return {
        "spec": spec,
        "data": {"rows": records(figure.rows[used])},
        "label": label,
        "measures": offered,
        "can_log": figure.mark in {"line", "point"} and not figure.lies,
    }


def timeline_chart(spans: Spans) -> dict[str, Any]:
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
    moved = alt.selection_interval(
        name="when", encodings=["x"], bind="scales", clear=False,
        zoom="wheel![event.ctrlKey || event.metaKey]",
    )  # fmt: skip
    chart = alt.layer(bars.add_params(moved), numbers).properties(
        width=900, height=30 * max(len(lanes), 1)
    )
    if spans.choice is not None:
        chart = chart.add_params(alt.param(name=spans.choice, value=""))
        chart = chart.properties(title=alt.TitleParams(alt.expr(spans.choice)))
    spec = chart.properties(description=spans.label).to_dict()
    return {"spec": spec, "data": {"spans": []}, "label": spans.label}


def _layers(figure: Figure, base: Any) -> list[Any]:
    """The marks of a figure, with intervals below and words above them."""
    looks = _looks(figure)
    x, y = _side(figure, figure.x), _side(figure, figure.y)
    placed = base.encode(x=x, y=y)
    marks = placed.encode(tooltip=_hover(figure), **looks)
    if figure.mark == "cells":
        return [marks.mark_rect()]
    foresees = f"indexof({sorted(figure.dashed)}, datum['{figure.series}']) >= 0"
    if figure.mark == "bar":
        layer = marks.mark_bar(
            clip=True, **{"height" if figure.lies else "width": {"band": 0.8}}
        )
        if figure.start is not None:
            start = _side(figure, figure.x, figure.start)
            layer = layer.encode(x=start, x2=figure.x.column)
    elif figure.mark == "line":
        points = {"filled": True, "size": 36}
        dashes = alt.condition(foresees, alt.value([5, 4]), alt.value([1, 0]))
        layer = marks.mark_line(point=points if figure.is_marked else False)
        layer = layer.encode(strokeDash=dashes)
    else:
        filled = alt.condition(foresees, alt.value(0.0), alt.value(0.75))
        fill = looks.get("color", alt.value(PALETTE[0]))
        layer = marks.mark_point(size=70, strokeWidth=1.5)
        layer = layer.encode(fill=fill, fillOpacity=filled)
    layers = [layer]
    if figure.low is not None:
        # Before a bar, which would hide half of it; behind other marks.
        layers.insert(figure.mark == "bar", _interval(figure, base, looks))
    if figure.text is not None:
        words = placed.mark_text(align="left", dx=4, dy=-8 * (figure.mark != "bar"))
        if figure.high is not None and figure.lies:
            end = f"max(datum['{figure.x.column}'], datum['{figure.high}'])"
            words = words.transform_calculate(beyond=end)
            words = words.encode(x=_side(figure, figure.x, "beyond"))
        layers.append(words.encode(text=f"{figure.text}:N"))
    return layers


def _interval(figure: Figure, base: Any, looks: dict[str, Any]) -> Any:
    """A band along lines, a rule through other marks."""
    marks = base.transform_filter(f"isValid(datum['{figure.low}'])")
    marks = marks.mark_area(opacity=0.2) if figure.mark == "line" else marks.mark_rule()
    if figure.mark != "bar" and looks:
        marks = marks.encode(color=looks["color"])
    low = _side(figure, figure.measured, figure.low)
    if figure.lies:
        return marks.encode(x=low, x2=figure.high, y=_side(figure, figure.y))
    return marks.encode(x=_side(figure, figure.x), y=low, y2=figure.high)


def _side(figure: Figure, axis: Axis, column: str | None = None) -> Any:
    """An axis of a page's figure; `column` stands there in place of its own."""
    channel = alt.X if axis is figure.x else alt.Y
    name = column or axis.column
    title = axis.words or None
    if axis.order is not None:
        is_tight = channel is alt.X and len(axis.order) > 4
        labels = alt.Axis(labelLimit=260, labelAngle=-20 if is_tight else alt.Undefined)
        return channel(f"{name}:N", title=title, sort=list(axis.order), axis=labels)
    # Cells and bars have a place for each whole number.
    if figure.mark == "cells" or (
        figure.mark == "bar" and axis is figure.x and axis.integer
    ):
        ticks = alt.Axis(labelOverlap=True, labelAngle=0, ticks=False)
        return channel(f"{name}:O", title=title, axis=ticks)
    # Room for marks at the edge, but none below zero.
    scale: dict[str, Any] = {"zero": axis.zero}
    if axis.limits is not None:
        scale = {"domain": list(axis.limits), "nice": False}
    elif axis.log:
        scale = {"type": "log", "padding": 8, "nice": False}
    elif not axis.zero:
        scale["padding"] = 8
    ticks = alt.Axis(format=axis.form or alt.Undefined)
    if axis.integer:
        ticks = alt.Axis(tickMinStep=1, format="d")
        # There is no layer before the first one.
        scale["nice"] = False
    return channel(f"{name}:Q", title=title, scale=alt.Scale(**scale), axis=ticks)


def _looks(figure: Figure) -> dict[str, Any]:
    """Colour and shape: by the names of the series, or of cells by a column."""
    shade = figure.colour
    if shade is not None:
        colours = list(figure.shades)
        scale = alt.Scale(range=colours)
        if shade.limits is not None:
            stops = np.linspace(*shade.limits, len(colours)).tolist()
            scale = alt.Scale(range=colours, domain=stops, clamp=True)
        key = alt.Legend(titleLimit=260, format=shade.form)
        name = f"{shade.column}:Q"
        return {"color": alt.Color(name, title=shade.words, scale=scale, legend=key)}
    known = figure.names()
    if not known:
        return {}
    name, legend = f"{figure.series}:N", None
    if len(known) > 1:
        # A band along a line would make the line's symbol as pale as itself.
        legend = alt.Legend(
            orient="top", columns=4, title=None, labelLimit=320, symbolOpacity=1
        )
    colours = [
        figure.colours.get(each, PALETTE[place % len(PALETTE)])
        for place, each in enumerate(known)
    ]
    scale = alt.Scale(domain=known, range=colours)
    looks: dict[str, Any] = {"color": alt.Color(name, scale=scale, legend=legend)}
    if figure.is_marked:
        # There may be more names than shapes: Vega begins again.
        scale = alt.Scale(domain=known, range=SHAPES)
        looks["shape"] = alt.Shape(name, scale=scale, legend=legend)
    return looks


def _hover(figure: Figure) -> list[Any]:
    """What hovering over a mark says."""
    axes = (figure.x, figure.y, figure.measured, *figure.measures)
    tips = [] if figure.series is None else [(figure.series, figure.series, "")]
    tips += [
        (axis.column, axis.words or axis.column, axis.form or ".4~g" * (not axis.order))
        for axis in axes
    ]
    # An empty format is none: words.
    by_column = {
        name: alt.Tooltip(f"{name}:Q", title=words, format=form)
        if form
        else alt.Tooltip(f"{name}:N", title=words)
        for name, words, form in [*tips, *figure.hover]
    }
    return list(by_column.values())


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
