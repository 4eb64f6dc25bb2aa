"""The figures that the seed papers published, as read from their text and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Record:
    """One published figure, as in ``data/published.yaml``. `value` is a number, or
    words such as ``4-5``.
    """

    source: str
    ref: str
    metric: str
    setting: dict[str, Any] = field(hash=False)
    value: Any = field(hash=False)
    unit: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Paper, place and metric: records that one experiment answers."""
        return self.source, self.ref, self.metric


@cache
def records() -> tuple[Record, ...]:
    """All published figures, in the order of their sources."""
    text = (resources.files("moesim") / "data" / "published.yaml").read_text(
        encoding="utf-8"
    )
    # The parser in C is many times as fast, where PyYAML was built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(text, loader)["records"]  # noqa: S506 - both are safe loaders
    return tuple(Record(**entry) for entry in entries)
