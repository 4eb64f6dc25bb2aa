"""Charts in Vega-Lite: one description serves pages, notebooks and picture files.

A function of a question describes its chart with the pieces of this module and returns
a `Chart`. `vl-convert-python` brings Vega's script, which pages carry, and draws PNG,
SVG and PDF without a browser. Why this library: ``docs/explanation/pages.md``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.base.files import user_folder, write_bytes, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

Spec = dict[str, Any]
Columns = dict[str, list[Any]]

GPU = "#0072B2"
CPU = "#D55E00"
"""What a GPU or the processor did, on every page and picture."""

PALETTE = (GPU, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", CPU, "#8C8C00", "#777777")
"""Colours that people who see few of them can tell apart, on light and dark paper.

Source: Okabe & Ito, *Color Universal Design* (2008); yellow darkened, black lightened.
"""

MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
DASHES = ((1, 0), (7, 2, 2, 2), (2, 2), (9, 3))
FORESEEING = (5, 4)
"""Line of a policy that sees the future."""

QUIET = "#8fa3ae"
LIMIT = "#CC79A7"
"""What must not be passed, such as free memory."""

DEVICES = (CPU, "#bdbdbd", GPU)
"""From the processor's colour to that of a GPU."""

KINDS = {
    "dense": "#8fa3ae",
    "plan": "#777777",
    "compute": GPU,
    "compute on CPU": CPU,
    "fetch": "#E69F00",
    "prefetch": "#56B4E9",
    "replace": "#CC79A7",
    "read": "#009E73",
    "activation": "#b9a88f",
    "join": "#c9c9c9",
}
"""Colours of the kinds of operations."""

SUFFIXES = (".png", ".svg", ".pdf")
PIXELS_PER_POINT = 1.5
VERSION = "6.4"
"""Of Vega-Lite."""

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, with its data.

    Notebooks show it with tooltips; `save` writes it. ``altair.Chart.from_dict`` takes
    `to_dict`, to change it further.

    Attributes:
        spec: Vega-Lite, without data.
        data: columns by name, for each data source that `spec` names.
        label: what it shows, in a sentence, also for readers who cannot see it.
    """

    spec: Spec
    data: Mapping[str, Columns] = field(repr=False)
    label: str

    def to_dict(self, *, dark: bool = False) -> Spec:
        """The whole description in Vega-Lite, data included."""
        datasets = {
            name: [
                dict(zip(columns, row, strict=True))
                for row in zip(*columns.values(), strict=True)
            ]
            for name, columns in self.data.items()
        }
        words = {"description": self.label, "config": config(dark=dark)}
        return {"$schema": _SCHEMA, **self.spec, **words, "datasets": datasets}

    def save(self, path: str | Path) -> Path:
        """Write the chart as PNG, SVG or PDF, by the end of its name; PNG by default.

        The same chart gives the same bytes, everywhere.
        """
        import vl_convert  # noqa: PLC0415 - see `_png`

        path = Path(path)
        if path.suffix == ".svg":
            text = vl_convert.vegalite_to_svg(self._on_paper(), vl_version=VERSION)
            write_text(path, text)
        elif path.suffix == ".pdf":
            picture = vl_convert.vegalite_to_pdf(self._on_paper(), vl_version=VERSION)
            write_bytes(path, picture)
        else:
            write_bytes(path, self._png())
        return path

    def _repr_html_(self) -> str:
        """The chart for a notebook: a picture, which becomes a chart where scripts run.

        The first chart of a process brings the script for all.
        """
        spec = json.dumps(self.to_dict()).replace("<", "\\u003c")
        name = f"chart-{hashlib.sha256(spec.encode()).hexdigest()[:12]}"
        picture = base64.b64encode(self._png()).decode("ascii")
        return (
            f'<div id="{name}"><img alt="{html.escape(self.label)}"'
            f' src="data:image/png;base64,{picture}"></div><script>{_first_script()}'
            f'if (window.vegaEmbed) vegaEmbed("#{name}", {spec}, {{actions: false}});'
            "</script>"
        )

    def _png(self) -> bytes:
        # Its engine takes a quarter of a second, which only pictures should cost.
        import vl_convert  # noqa: PLC0415 - as said above

        picture: bytes = vl_convert.vegalite_to_png(
            self._on_paper(), vl_version=VERSION, scale=PIXELS_PER_POINT
        )
        return picture

    def _on_paper(self) -> Spec:
        spec = self.to_dict()
        spec["config"] |= {"background": "white"}
        return spec


def _first_script() -> str:
    """Vega's script for the first chart of this process, nothing for others."""
    if _brought:
        return ""
    _brought.append(True)
    return script()


_brought: list[bool] = []


def script() -> str:
    """Vega and Vega-Lite for a page; they define ``vegaEmbed``.

    Putting them together takes two seconds, so they are kept in the user's cache
    folder, where there is one.
    """
    from importlib.metadata import version  # noqa: PLC0415 - for pages only

    name = f"vega-{VERSION}-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return (user_folder("cache") / "pages" / name).read_text(encoding="utf-8")

    import vl_convert  # noqa: PLC0415 - see `Chart._png`

    libraries = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VERSION
    )
    # Their names must not meet those of a page.
    text = f"(() => {{{libraries}}})();"
    with suppress(OSError):
        write_text(user_folder("cache") / "pages" / name, text)
    return text


def config(*, dark: bool = False) -> Spec:
    """How charts look, on light or dark paper."""
    ink, quiet = ("#e4e4e4", "#5a5a5a") if dark else ("#222222", "#cccccc")
    words = {"labelColor": ink, "titleColor": ink, "titleFontWeight": "normal"}
    return {
        "background": None,
        "font": "system-ui, Liberation Sans, sans-serif",
        "view": {"stroke": None},
        "axis": {
            **words,
            "domainColor": quiet,
            "tickColor": quiet,
            "gridColor": quiet,
            "gridOpacity": 0.5,
            "labelLimit": 260,
            "labelFontSize": 11,
        },
        "legend": {**words, "labelFontSize": 11, "labelLimit": 300, "symbolLimit": 40},
        "header": {**words, "labelAnchor": "start", "labelFontSize": 12},
        "title": {"color": ink, "anchor": "start", "fontWeight": "normal"},
        "text": {"color": ink},
        "rule": {"color": ink},
        "bar": {"color": GPU},
        "line": {"color": GPU},
        "point": {"color": GPU, "filled": True, "size": 50},
        "range": {"category": list(PALETTE)},
    }


# Pieces of a description.


def columns_of(frame: pd.DataFrame) -> Columns:
    """A data frame as columns of plain values, as a chart takes them."""
    columns = frame.astype(object).where(frame.notna(), None)
    return {str(name): columns[name].tolist() for name in frame}


def records(rows: Iterable[Mapping[str, Any]]) -> Columns:
    """Rows with the same keys as columns."""
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


def channel(name: str, title: str | None = None, kind: str = "Q", **more: Any) -> Spec:
    """Which column is shown by position, colour or size, and how.

    Args:
        name: of the column.
        title: of its axis or legend; None for none.
        kind: ``Q`` for amounts, ``N`` for names, ``O`` for ordered names.
        more: Vega-Lite, such as ``scale``.
    """
    kinds = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    return {"field": name, "title": title, "type": kinds[kind], **more}


def shown(*named: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """What hovering over a mark says: column, words and perhaps a number format."""
    return [
        {"field": name, "title": words, **({"format": form[0]} if form else {})}
        for name, words, *form in named
    ]


def layer(mark: str | Spec, data: str | None = None, **encoding: Any) -> Spec:
    """A mark with its encoding.

    Args:
        mark: Vega-Lite's name, or its properties.
        data: where its rows are; None for those of the chart around it.
        encoding: a `channel` for each of ``x``, ``y``, ``color`` and so on;
            ``transform`` and ``params`` are those of the layer.
    """
    spec: Spec = {"mark": mark}
    for name in ("transform", "params"):
        if name in encoding:
            spec[name] = encoding.pop(name)
    if data is not None:
        spec["data"] = {"name": data}
    return {**spec, "encoding": encoding}


def rule(value: float, axis: str = "y", **look: Any) -> Spec:
    """A straight line at a value of an axis."""
    mark = {"type": "rule", "strokeDash": [4, 3], **look}
    return {
        "data": {"values": [{}]},
        "mark": mark,
        "encoding": {axis: {"datum": value}},
    }


@dataclass(frozen=True, slots=True)
class Styles:
    """How policies are drawn: the same names have the same styles in any order.

    Attributes:
        names: of the policies.
        oracles: those that see the future; their lines are dashed and marks hollow.
    """

    names: Sequence[str]
    oracles: frozenset[str] = frozenset()

    def _scale(self, values: Sequence[Any]) -> Spec:
        ordered = sorted(dict.fromkeys(self.names))
        styles = [values[place % len(values)] for place in range(len(ordered))]
        return {"domain": ordered, "range": styles}

    def colour(self, column: str = "policy", **more: Any) -> Spec:
        """Colour by policy."""
        return channel(column, None, "N", scale=self._scale(PALETTE), **more)

    def mark(self, column: str = "policy") -> Spec:
        """Shape of a point by policy."""
        return channel(column, None, "N", scale=self._scale(MARKS))

    def dash(self, column: str = "policy", **more: Any) -> Spec:
        """Dashes of a line by policy."""
        scale = self._scale(DASHES)
        scale["range"] = [
            FORESEEING if name in self.oracles else DASHES[place // len(PALETTE) % 4]
            for place, name in enumerate(scale["domain"])
        ]
        return channel(column, None, "N", scale=scale, **more)

    def width(
        self, column: str = "policy", sizes: tuple[float, float] = (4.2, 1.2)
    ) -> Spec:
        """Width of a line or size of a mark by policy, from the first to the last:
        later ones are smaller, so that none hides another.
        """
        scale = self._scale([None])
        steps = max(len(scale["domain"]) - 1, 1)
        first, last = sizes
        scale["range"] = [
            first + (last - first) * place / steps
            for place in range(len(scale["domain"]))
        ]
        return channel(column, None, "O", scale=scale)

    def lines(self, x: Spec, y: Spec, hover: list[Spec]) -> list[Spec]:
        """Layers of a line with marks for each policy."""
        colour = self.colour()
        line = layer(
            "line",
            x=x,
            y=y,
            color=colour,
            strokeDash=self.dash(),
            strokeWidth=self.width(),
        )
        points = layer(
            "point", x=x, y=y, color=colour, shape=self.mark(), tooltip=hover
        )
        return [line, points]


def line_figure(frame: pd.DataFrame, title: str, *, log: bool = False) -> Chart:
    """Draw a line for each column of a table over its index.

    Args:
        frame: numbers; the index has the name of the horizontal axis.
        title: of the vertical axis.
        log: both axes are logarithmic.
    """
    across = str(frame.index.name)
    rows = frame.melt(ignore_index=False, var_name="policy", value_name="value")
    rows = rows.rename_axis("across").reset_index()
    scale = {"type": "log"} if log else {"zero": False}
    x = channel("across", across, scale=scale)
    y = channel("value", title, scale=scale)
    hover = shown(("policy", "line"), ("across", across), ("value", title, ".4g"))
    lines = Styles(list(map(str, frame.columns))).lines(x, y, hover)
    spec = {"data": {"name": "rows"}, "width": 480, "height": 260, "layer": lines}
    return Chart(spec, {"rows": columns_of(rows)}, f"{title} over {across}")
