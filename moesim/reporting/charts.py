"""Charts in Vega-Lite by hand, for the pages of advice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.reporting.figures import GPU, LIMIT, PALETTE, QUIET
from moesim.reporting.interactive import Chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.reporting.interactive import Columns, Spec

__all__ = [
    "GPU",
    "LIMIT",
    "PALETTE",
    "QUIET",
    "Chart",
    "channel",
    "layer",
    "records",
    "shown",
]


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
