"""Figures that answer when touched: the descriptions of `moesim.reporting.figures`
through Altair, for pages.

Hovering shows values, a click on a name in the legend hides it, and a figure follows
those choices of its page whose names are its parameters. Altair writes the description
only; ``vl-convert`` brings Vega's script, which pages carry.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.files import user_folder, write_text
from moesim.reporting.figures import (
    MOST_PANELS_ABREAST,
    PALETTE,
    QUIET,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from moesim.reporting.figures import Axis, Figure

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

DASHES = ([1, 0], [7, 2, 2, 2], [2, 2], [9, 3])
FORESEEING = [5, 4]
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
WIDTH = 760
HEIGHT = 280
VERSION = "6.4"
"""Of Vega-Lite."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure for a page.

    Attributes:
        spec: Vega-Lite, without data.
        data: columns by name, for each data source that `spec` names.
        label: what it shows, in a sentence.
        measures: columns and words that a reader can put onto the axis, the one that is
            there first; none offers no choice.
        can_log: whether that axis can be logarithmic.
    """

    spec: Spec
    data: Mapping[str, Columns] = field(repr=False)
    label: str
    measures: Mapping[str, str] = field(default_factory=dict)
    can_log: bool = False


def columns_of(frame: pd.DataFrame) -> Columns:
    """A data frame as columns of plain values, as a page carries them."""
    columns = frame.astype(object).where(frame.notna(), None)
    return {str(name): columns[name].tolist() for name in frame}


def interactive(
    figure: Figure,
    *,
    where: Mapping[str, str] | None = None,
    chosen: Mapping[str, str] | None = None,
    zooms: bool = False,
    opens: bool = False,
    front: bool = False,
) -> Chart:
    """Put a figure onto a page.

    Args:
        figure: what is drawn.
        where: by column, the choice of the page whose value it must have; ``all``
            stands for any.
        chosen: by choice, the value that is chosen at first.
        zooms: whether axes can be dragged and zoomed.
        opens: whether a click on a mark chooses its ``run``.
        front: whether a line joins the marks that nothing beats in both axes.
    """
    import altair as alt  # noqa: PLC0415 - half a second that only pages should cost

    base: Any = alt.Chart(alt.NamedData("rows"))
    for column, choice in (where or {}).items():
        test = f"{choice} == 'all' || datum['{column}'] + '' == {choice}"
        base = base.transform_filter(test)
    parts = _parts(figure, base, alt, pointer=opens)
    if figure.series is not None and figure.mark not in {"cells", "tile"}:
        hidden = alt.selection_point(
            name="hidden", fields=[figure.series], bind="legend", toggle="true",
            empty=False,
        )  # fmt: skip
        parts = [part.transform_filter(~hidden) for part in parts]
        # One part carries it: a name may stand in a chart once.
        parts[-1] = parts[-1].add_params(hidden)
    if zooms:
        zoom = alt.selection_interval(
            name="zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]"
        )
        parts[0] = parts[0].add_params(zoom)
    if front:
        parts.append(_front(figure, base, alt))
    parts += [_rule(each, alt) for each in figure.rules]
    if figure.lines:
        line = alt.Chart(alt.NamedData("lines")).mark_line(color=QUIET, strokeWidth=1)
        parts.append(
            line.encode(
                x=_side(figure.x, alt, alt.X, column="x"),
                y=_side(figure.y, alt, alt.Y, column="y"),
                detail="words:N",
                tooltip="words:N",
            )
        )
    chart = alt.layer(*parts) if len(parts) > 1 else parts[0]
    if figure.panel is not None and len(figure.panels()) > 1:
        chart = chart.properties(width=230, height=200).facet(
            facet=alt.Facet(
                f"{figure.panel}:N",
                title=None,
                sort=[name for name, _ in figure.panels()],
            ),
            columns=MOST_PANELS_ABREAST,
        )
    else:
        chart = chart.properties(width=WIDTH, height=_height(figure))
    starts = dict.fromkeys((where or {}).values(), "all") | dict(chosen or {})
    chart = chart.add_params(*(alt.param(name=n, value=v) for n, v in starts.items()))
    if figure.title and not where:
        chart = chart.properties(title=figure.title)
    spec = chart.to_dict()
    for name in ("$schema", "config", "datasets"):
        spec.pop(name, None)
    drawn = figure.colour or (figure.y if figure.y.order is None else figure.x)
    offered = [drawn, *figure.measures] if figure.measures else [drawn]
    wanted = {axis.column: axis.words for axis in offered}
    can_log = figure.mark in {"line", "point"} and figure.y.order is None
    points = [
        (x, y, words)
        for across, up, words in figure.lines
        for x, y in zip(across, up, strict=True)
    ]
    names = ("x", "y", "words")
    lines = {name: [each[at] for each in points] for at, name in enumerate(names)}
    used = {*_used(figure, offered), *(where or {}), "run", "oracle"}
    rows = figure.rows[[name for name in figure.rows if name in used]]
    data = {"rows": columns_of(rows), "one": {"at": [0]}, "lines": lines}
    return Chart(spec, data, figure.label, wanted, can_log)


def timeline_chart(figure: Figure, where: Mapping[str, str] | None = None) -> Chart:
    """A timeline, whose rows the script of the page puts there as far as they are seen.

    Args:
        figure: of spans.
        where: the choice of the page that names the run, by ``run``; None for one run.
    """
    import altair as alt  # noqa: PLC0415 - as in `interactive`

    x = alt.X(
        f"{figure.start}:Q", title=figure.x.words, axis=alt.Axis(grid=True),
        scale=alt.Scale(domain=[0, 1], nice=False),
    )  # fmt: skip
    lanes = list(figure.y.order or ())
    y = alt.Y("lane:N", title=None, sort=lanes, scale=alt.Scale(domain=lanes))
    scale = alt.Scale(domain=list(figure.colours), range=list(figure.colours.values()))
    legend = alt.Legend(orient="top", columns=5, title=None)
    moved = alt.selection_interval(
        name="when", encodings=["x"], bind="scales", clear=False,
        zoom="wheel![event.ctrlKey || event.metaKey]",
    )  # fmt: skip
    base = alt.Chart(alt.NamedData("spans")).encode(x=x, y=y, tooltip="lane:N")
    bars = base.mark_bar(clip=True, height={"band": 0.85}).encode(
        x2="end", color=alt.Color(f"{figure.series}:N", scale=scale, legend=legend)
    )
    numbers = (
        base.transform_filter("datum.label != ''")
        .transform_calculate(middle="(datum.start + datum.end) / 2")
        .mark_text(clip=True, color="white", fontSize=10)
        .encode(x="middle:Q", text="label:N")
    )
    chart = alt.layer(bars.add_params(moved), numbers).properties(
        width=900, height=30 * max(len(lanes), 1)
    )
    for choice in (where or {}).values():
        chart = chart.add_params(alt.param(name=choice, value=""))
        chart = chart.properties(title=alt.TitleParams(alt.expr(choice)))
    spec = chart.to_dict()
    for name in ("$schema", "config"):
        spec.pop(name, None)
    empty: Columns = {name: [] for name in ("lane", "kind", "start", "end", "label")}
    return Chart(spec, {"spans": empty}, figure.label)


def _height(figure: Figure) -> int:
    if figure.y.order is not None:
        return max(60, (46 if figure.mark == "tile" else 28) * len(figure.y.order))
    if figure.mark == "cells":
        return min(max(60, 9 * int(figure.rows[figure.y.column].nunique())), 400)
    return HEIGHT


def _parts(  # noqa: C901 - a case for each mark
    figure: Figure, base: Any, alt: Any, *, pointer: bool
) -> list[Any]:
    """The layers of a figure."""
    hover = [
        alt.Tooltip(f"{column}:{kind}", title=words, format=form)
        for column, words, form, kind in _hover(figure)
    ]
    encoding = {"x": _side(figure.x, alt, alt.X), "y": _side(figure.y, alt, alt.Y)}
    looks = _looks(figure, alt)
    cursor = {"cursor": "pointer"} if pointer else {}
    marks = base.encode(**encoding, tooltip=hover)
    if figure.mark == "cells":
        return [_cells(figure, marks, alt)]
    if figure.mark == "tile":
        boxes = marks.mark_rect(fillOpacity=0.28, **cursor)
        words = marks.mark_text(lineBreak="\n", limit=190, **cursor)
        colour = looks["color"].legend(None)
        return [
            boxes.encode(color=colour),
            words.encode(text=f"{figure.text}:N"),
        ]
    if figure.mark in {"bar", "span"}:
        colours = (
            {"color": looks["color"]} if looks else {"color": alt.value(PALETTE[0])}
        )
        # On an axis of numbers a bar has no width of its own.
        size = {}
        if figure.mark == "bar" and figure.y.order is None and figure.x.order is None:
            size = {"size": max(2, int(0.8 * WIDTH / max(1, len(figure.rows))))}
        bars = marks.mark_bar(clip=True, **size, **cursor).encode(**colours)
        if figure.start is not None:
            bars = bars.encode(
                x=_side(figure.x, alt, alt.X, column=figure.start), x2=figure.x.column
            )
        parts = [bars]
    elif figure.mark == "line":
        width = {"strokeDash": looks["strokeDash"]} if looks else {}
        colours = {"color": looks["color"]} if looks else {}
        parts = [marks.mark_line().encode(**colours, **width)]
        if figure.marked:
            points = marks.mark_point(filled=True, size=36, **cursor).encode(**colours)
            parts.append(points.encode(shape=looks["shape"]) if looks else points)
    else:
        hollow = alt.value(0.75)
        if figure.dashed and figure.series is not None:
            test = f"indexof({sorted(figure.dashed)}, datum['{figure.series}']) >= 0"
            hollow = alt.condition(test, alt.value(0.0), alt.value(0.75))
        shown = {name: looks[name] for name in ("color", "shape") if looks}
        parts = [
            marks.mark_point(size=70, strokeWidth=1.5, **cursor).encode(
                **shown,
                fillOpacity=hollow,
                **({"fill": looks["color"]} if looks else {}),
            )
        ]
    if figure.low is not None:
        parts.insert(0, _interval(figure, base, alt, looks))
    if figure.text is not None:
        lies = figure.mark in {"bar", "span"}
        words = marks.mark_text(align="left", dx=4, dy=0 if lies else -8)
        parts.append(words.encode(text=f"{figure.text}:N"))
    return parts


def _cells(figure: Figure, marks: Any, alt: Any) -> Any:
    """Cells, coloured by a column."""
    shade = figure.colour
    assert shade is not None
    low, high = shade.limits or (None, None)
    scale = alt.Scale(range=list(figure.shades), **_ends(figure, low, high))
    legend = alt.Legend(titleLimit=260, format=shade.form or "")
    colour = alt.Color(
        f"{shade.column}:Q", title=shade.words, scale=scale, legend=legend
    )
    for side in ("x", "y"):
        axis = getattr(figure, side)
        kind = {"x": alt.X, "y": alt.Y}[side]
        marks = marks.encode(
            **{
                side: kind(
                    f"{axis.column}:O",
                    title=axis.words,
                    axis=alt.Axis(labelOverlap=True, ticks=False),
                )
            }
        )
    return marks.mark_rect().encode(color=colour)


def _interval(figure: Figure, base: Any, alt: Any, looks: dict[str, Any]) -> Any:
    """A band along lines, a rule through other marks."""
    across = figure.y.order is not None
    axis, kind = (figure.x, alt.X) if across else (figure.y, alt.Y)
    side, other = ("x", "y") if across else ("y", "x")
    rest = (figure.y, alt.Y) if across else (figure.x, alt.X)
    marks = base.transform_filter(f"isValid(datum['{figure.low}'])")
    mark = marks.mark_area(opacity=0.2) if figure.mark == "line" else marks.mark_rule()
    encoding = {
        side: _side(axis, alt, kind, column=figure.low),
        f"{side}2": figure.high,
        other: _side(rest[0], alt, rest[1]),
    }
    if figure.mark != "bar" and looks:
        encoding["color"] = looks["color"]
    return mark.encode(**encoding)


def _side(axis: Axis, alt: Any, kind: Any, *, column: str | None = None) -> Any:
    """An axis of a page's figure."""
    name = column or axis.column
    if axis.order is not None:
        turned = {"labelAngle": -20} if kind is alt.X and len(axis.order) > 4 else {}
        return kind(
            f"{name}:N", title=axis.words or None, sort=list(axis.order),
            axis=alt.Axis(labelLimit=260, **turned),
        )  # fmt: skip
    # Room for marks at the edge, but none below zero.
    scale: dict[str, Any] = (
        {"zero": True} if axis.zero else {"zero": False, "padding": 8}
    )
    if axis.log:
        scale = {"type": "log", "padding": 8, "nice": False}
    if axis.limits is not None:
        scale = {"domain": list(axis.limits), "nice": False}
    form: dict[str, Any] = {"format": axis.form} if axis.form else {}
    if axis.integer:
        form = {"tickMinStep": 1, "format": "d"}
    return kind(
        f"{name}:Q", title=axis.words or None, scale=alt.Scale(**scale), **(
            {"axis": alt.Axis(**form)} if form else {}
        ),
    )  # fmt: skip


def _ends(figure: Figure, low: float | None, high: float | None) -> dict[str, Any]:
    if low is None or high is None:
        return {}
    stops = np.linspace(low, high, len(figure.shades)).tolist()
    return {"domain": stops, "clamp": True}


def _looks(figure: Figure, alt: Any) -> dict[str, Any]:
    """Colour, shape and dashes by the names of the series."""
    known = figure.names()
    if not known:
        return {}
    colours = [
        figure.colours.get(name, PALETTE[place % len(PALETTE)])
        for place, name in enumerate(known)
    ]
    dashes = [
        FORESEEING if name in figure.dashed else DASHES[place // len(PALETTE) % 4]
        for place, name in enumerate(known)
    ]
    shapes = [SHAPES[place % len(SHAPES)] for place in range(len(known))]
    series = f"{figure.series}:N"
    legend = alt.Legend(orient="top", columns=4, title=None, labelLimit=320)

    def scale(values: Sequence[Any]) -> Any:
        return alt.Scale(domain=known, range=list(values))

    return {
        "color": alt.Color(series, scale=scale(colours), legend=legend),
        "shape": alt.Shape(series, scale=scale(shapes), legend=legend),
        "strokeDash": alt.StrokeDash(series, scale=scale(dashes), legend=legend),
    }


def _used(figure: Figure, offered: Sequence[Axis]) -> set[str | None]:
    """Columns that a figure shows."""
    axes = [figure.x, figure.y, figure.colour, *offered]
    marks = (figure.series, figure.low, figure.high, figure.start, figure.panel)
    shown = (each[0] for each in _hover(figure))
    return {*(axis.column for axis in axes if axis), *marks, figure.text, *shown}


def _hover(figure: Figure) -> list[tuple[str, str, str, str]]:
    """Column, words, number format and kind of what hovering says."""
    shown: list[tuple[str, str, str, str]] = []
    if figure.series is not None:
        shown.append((figure.series, figure.series, "", "N"))
    for axis in (figure.x, figure.y, figure.colour):
        if axis is None:
            continue
        kind = "N" if axis.order is not None else "Q"
        form = axis.form or (".4~g" if kind == "Q" else "")
        shown.append((axis.column, axis.words or axis.column, form, kind))
    shown += [(*each, "Q" if each[2] else "N") for each in figure.hover]
    # An empty format is none.
    unique = {each[0]: each for each in shown}
    return list(unique.values())


def _rule(each: tuple[str, float, str], alt: Any) -> Any:
    side, value, words = each
    mark = alt.Chart(alt.NamedData("one")).mark_rule(strokeDash=[4, 3], color=QUIET)
    return mark.encode(
        **{side: alt.datum(value)}, tooltip=alt.value(f"{words}: {value:.4g}")
    )


def _front(figure: Figure, base: Any, alt: Any) -> Any:
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
        .encode(
            x=_side(figure.x, alt, alt.X),
            y=_side(figure.y, alt, alt.Y),
            order=f"{x}:Q",
        )
    )


def script() -> str:
    """Vega and Vega-Lite for a page; they define ``vegaEmbed``.

    Putting them together takes two seconds, so they are kept in the user's cache
    folder, where there is one.
    """
    from importlib.metadata import version  # noqa: PLC0415 - for pages only

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
        "line": {"color": PALETTE[0]},
        "point": {"color": PALETTE[0]},
        "range": {"category": list(PALETTE)},
    }
