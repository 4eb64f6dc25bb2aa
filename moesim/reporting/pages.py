"""Answers as HTML pages, each one file that loads nothing from elsewhere.

``templates/page.html`` lays a page out, ``templates/page.js`` makes it answer.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from moesim.base.text import visible, visible_lines
from moesim.base.version import __version__
from moesim.reporting.figures import Figure
from moesim.reporting.interactive import CONFIG, interactive, script, timeline_chart
from moesim.reporting.parts import Facts, Listing, Shown, Spans

STATIC_ROWS = 300
"""Longer tables are made by the page's script, a part at a time."""


def page_html(answer: Any) -> str:
    """The page of a `moesim.reporting.answers.Answer`."""
    scripted: list[Any] = []
    sections = []
    for section in answer.sections():
        parts = []
        for part in section.parts:
            # A table without rows says nothing.
            if not isinstance(part, Listing) or len(part.rows):
                scripted.append(_scripted(part))
                parts.append((part, type(part).__name__, len(scripted) - 1))
        if parts:
            sections.append((section, parts))
    plain = json.dumps({"looks": CONFIG, "parts": scripted}, separators=(",", ":"))
    draws = any("spec" in (part or ()) for part in scripted)
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=answer,
            origin=_origin(answer),
            sections=sections,
            scripted=scripted,
            # Deflated: a browser takes milliseconds to read it.
            data=base64.b64encode(zlib.compress(plain.encode(), 9)).decode("ascii"),
            vega=script() if draws else "",
        )
    )


def _scripted(part: Any) -> dict[str, Any] | None:
    """What the page's script reads of a part."""
    match part:
        case Figure():
            return interactive(Shown(part))
        case Shown():
            return interactive(part)
        case Spans():
            return timeline_chart(part) | part._asdict()
        case Facts(choice, table):
            values = dict(enumerate(table.cells()))
            return {"choice": choice, "names": table.heads(), "values": values}
        case Listing() if len(part.rows) > STATIC_ROWS:
            return {"rows": part.cells()}
    return None


def _origin(answer: Any) -> list[tuple[str, str]]:
    """Where the figures come from: name and words of each line."""
    # The convention of reproducible builds: same input, same bytes.
    stated = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.now(UTC)
    if stated.isdecimal():
        now = datetime.fromtimestamp(int(stated), UTC)
    return [
        *answer.sources.items(),
        ("command", answer.command or "a call from Python"),
        ("made", f"{now:%Y-%m-%d %H:%M} UTC by moesim {__version__}"),
    ]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("moesim.reporting"),
        autoescape=True,
        # Names from files may hold control characters.
        finalize=lambda value: visible(value) if type(value) is str else value,
        # A forgotten name is an error, not an empty place on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Of names within such a text, line ends cannot be told from its own.
    environment.filters["lines"] = lambda text: escape(visible_lines(text))
    environment.filters["words"] = _words
    return environment


def _words(text: str) -> Markup:
    """A sentence, in which backticks mark code."""
    parts = [escape(visible(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(visible(text))
    parts[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(parts)
