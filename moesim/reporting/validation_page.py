"""The report of a validation: its files, and the HTML page among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesim.hwprofiles.errors import ProfileError
from moesim.reporting.pages import (
    PageTable,
    page_figure,
    page_origin,
    render,
    trace_words,
)
from moesim.reporting.validation_figures import FIGURES
from moesim.reporting.validation_text import (
    CELL_HEADS,
    SHARED_HEADS,
    TITLE,
    cell_rows,
    facts,
    markdown,
    setting,
    shared_rows,
)
from moesim.traces.files import written_beside


def page(result: dict[str, Any], command: str | None = None) -> str:
    """The whole report as HTML; nothing is loaded from elsewhere."""
    traces = [
        trace_words(name, digest) for name, digest in result["config"]["traces"].items()
    ]
    return render(
        "validation.html",
        title=TITLE,
        origin=page_origin(command, traces="; ".join(traces)),
        setting=setting(result),
        facts=PageTable(["figure", "value"], facts(result)),
        figures=[
            page_figure(draw(result), caption) for caption, draw in FIGURES.items()
        ],
        cells=PageTable(CELL_HEADS, cell_rows(result)),
        shared=PageTable(SHARED_HEADS, shared_rows(result)),
        warnings=result["warnings"],
    )


def load(path: str | Path) -> dict[str, Any]:
    """Read what `save` wrote as ``validation.json``.

    Raises:
        ProfileError: it is no such file.
    """
    expected = "expected a validation.json that `moesim validate --out` wrote"
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: {expected}, found {error}") from None
    # Any JSON can be loaded; these keys tell a report from other files.
    keys = {"cells", "config", "warnings"}
    if not isinstance(result, dict) or not keys <= result.keys():
        raise ProfileError(f"{path}: {expected}, found other JSON")
    return result


def save(
    result: dict[str, Any], folder: str | Path, command: str | None = None
) -> list[Path]:
    """Write ``validation.json``, ``validation.md`` and ``validation.html``; return
    their paths.
    """
    # Figures of other kinds can be drawn later, from the JSON file.
    texts = {
        "json": json.dumps(result, indent=1),
        "md": markdown(result),
        "html": page(result, command),
    }
    paths = []
    for suffix, text in texts.items():
        path = Path(folder) / f"validation.{suffix}"
        with written_beside(path) as part:
            part.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
