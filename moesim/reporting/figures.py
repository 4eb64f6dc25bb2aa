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
from typing import TYPE_CHECKING, NamedTuple

from moesim.base.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure


GPU = "#0072B2"
CPU = "#D55E00"
"""What a GPU or the processor did, on every page and figure."""

PALETTE = (GPU, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", CPU, "#8C8C00", "#404040")
"""Colours that people who see few of them can tell apart.

Source: Okabe & Ito, *Color Universal Design* (2008); yellow darkened, black lightened.
"""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "-.", ":")

STRONG = GPU
QUIET = "#9bb1bd"
KINDS = {
    "dense": "#9bb1bd",
    "plan": "#757575",
    "compute": GPU,
    "fetch": "#E69F00",
    "prefetch": "#56B4E9",
    "replace": "#CC79A7",
    "read": "#009E73",
    "activation": "#c9c9c9",
    "join": "#dddddd",
}
"""Colours of the kinds of operations; what the processor computes has its colour."""


class Style(NamedTuple):
    """How one policy is drawn, wherever it is drawn.

    Attributes:
        colour: of its line and marks.
        mark: of its points, in matplotlib's letters.
        line: of its line; policies that see the future are dashed instead.
        width: of its line: later ones are thinner, so that none hides another.
    """

    colour: str
    mark: str
    line: str
    width: float


def policy_styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each policy; the same names get the same styles in any order."""
    ordered = sorted(dict.fromkeys(names))
    return {
        name: Style(
            PALETTE[place % len(PALETTE)],
            MARKS[place % len(MARKS)],
            LINES[place // len(PALETTE) % len(LINES)],
            1.0 + 2.5 * (len(ordered) - place) / len(ordered),
        )
        for place, name in enumerate(ordered)
    }


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
    # Through memory: what a failing disk does to a drawing library is its own matter.
    picture = io.BytesIO()
    figure.savefig(picture, format=file_format, dpi=120)
    write_bytes(path, picture.getbuffer())
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
