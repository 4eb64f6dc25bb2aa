"""The routing of a live run on disk, so that its run can be repeated: one `.npz` file
with what the gates decided, pass by pass. Other runs have theirs in a trace.
"""

from __future__ import annotations

import io
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.base.errors import StoreError, TraceError
from moesim.base.files import write_bytes
from moesim.traces.format.batch import RoutedLayer, RoutedStep
from moesim.traces.format.schema import Phase
from moesim.traces.importers.readers.arrays import load_named

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE_NAME: Final = "routing.npz"
_PASSES = "passes"
_FIELDS = ("step", "phase", "batch", "tokens", "context_tokens", "sequences")
"""Of `RoutedStep`, all but its layers: a row of the array `_PASSES`."""


def save_routing(path: Path, steps: Iterable[RoutedStep]) -> None:
    """Write what the gates decided; written beside, then renamed."""
    arrays: dict[str, np.ndarray] = {}
    passes = []
    for step in steps:
        passes.append([int(getattr(step, name)) for name in _FIELDS])
        for layer in step.layers:
            for name, values in _arrays_of(layer).items():
                arrays[f"{step.step}/{layer.layer}/{name}"] = values
    arrays[_PASSES] = np.array(passes, np.int64).reshape(-1, len(_FIELDS))
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
    write_bytes(path, archive.getbuffer())


def load_routing(path: Path) -> list[RoutedStep]:
    """Read it back.

    Raises:
        StoreError: not such a file.
    """
    by_step: dict[int, dict[int, dict[str, np.ndarray]]]
    by_step = defaultdict(lambda: defaultdict(dict))
    steps = []
    try:
        arrays = load_named(path)
        passes = arrays.pop(_PASSES).tolist()
        for key, values in arrays.items():
            number, layer, name = key.split("/", 2)
            by_step[int(number)][int(layer)][name] = values
        for row in passes:
            facts = dict(zip(_FIELDS, row, strict=True))
            layers = sorted(by_step[facts["step"]].items())
            facts |= {
                "phase": Phase(facts["phase"]),
                "layers": [_layer_of(layer, named) for layer, named in layers],
            }
            steps.append(RoutedStep(**facts))
    except (OSError, TraceError, KeyError, ValueError, TypeError) as error:
        raise StoreError(
            f"{path}: expected the routing of a live run, found: {error}; run it again"
        ) from None
    return steps


def _arrays_of(layer: RoutedLayer) -> dict[str, np.ndarray]:
    """What a gate decided, by name; without what it did not tell."""
    named: dict[str, Any] = {
        name: getattr(layer, name) for name in ("routing", "weights", "scores")
    }
    named |= {f"predicted/{name}": values for name, values in layer.predicted.items()}
    return {name: values for name, values in named.items() if values is not None}


def _layer_of(layer: int, named: dict[str, np.ndarray]) -> RoutedLayer:
    """The inverse of `_arrays_of`."""
    experts, tokens = np.unique(named["routing"], return_counts=True)
    return RoutedLayer(
        layer=layer,
        experts=experts.astype(np.int32),
        tokens=tokens.astype(np.int32),
        routing=named["routing"],
        weights=named.get("weights"),
        scores=named.get("scores"),
        predicted={
            key.removeprefix("predicted/"): values
            for key, values in named.items()
            if key.startswith("predicted/")
        },
    )
