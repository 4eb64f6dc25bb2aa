"""Tables of devices, options and keys that ship with advice."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def table(name: str) -> Any:
    """Return a table of ``advice/data``, as it stands there; not to be changed."""
    text = resources.files("moesim.advice").joinpath(f"data/{name}.yaml")
    # The loader in C reads ten times as fast, where libyaml is there.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(text.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 # safe, in C or in Python
