"""Synthetic traces in one call: like a real one, or of stated statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesim.base.errors import TraceError
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.generate import of_lengths, stated, synthesise
from moesim.traces.synthetic.saved import model_like, save, shipped_statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moesim.traces.format.schema import ModelShape
    from moesim.traces.stats.routing_curves import Likeness
    from moesim.traces.synthetic.draw import SynthModel

LENGTHS = ("prompt_tokens", "new_tokens")
"""What may be stated beside `like`: a trace of decode tokens only may be drawn with
prompts.
"""


def synth(
    target: Path | str,
    *,
    tokens: float,
    like: Path | str | None = None,
    save_stats: Path | str | None = None,
    shape: str | None = None,
    quant: str | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    comparison: Callable[[Likeness | None], None] | None = None,
    **statistics: Any,
) -> Trace:
    """Draw a trace with the statistics of a real one, or with stated ones.

    Args:
        target: the trace to write; it appears when it is complete.
        tokens: how many, such as 1e6.
        like: a trace to resemble, saved statistics of one, or the name of those that
            ship.
        save_stats: where the statistics of `like` are saved, which `like` takes.
        shape: a model instead of `like`, by name or in words. Where statistics of a
            model of that name ship and none is stated, they are drawn from.
        quant: weight format; None takes ``bf16``, or with `like` that of the trace.
        seed: same arguments, same file.
        progress: called with the number of rows written so far.
        comparison: called with what is drawn against what is real; None where nothing
            real is known of the model.
        statistics: ``skew``, ``topic``, ``reuse``, ``memory``, ``dependence``,
            ``drift`` with `shape`; ``prompt_tokens`` and ``new_tokens`` with either
            (see `moesim.traces.synthetic.generate.stated`).

    Raises:
        TraceError: both `like` and `shape` or neither, a statistic that `like`
            measures, or a number out of range.
    """
    if (like is None) == (shape is None):
        raise TraceError("expected either --like TRACE or --shape MODEL")
    if like is None:
        if save_stats is not None:
            raise TraceError(
                "--save-stats: expected --like beside it: stated statistics need no"
                " file"
            )
        described = model_shape(str(shape), quant or "bf16")
        model = _model_of(described, seed, statistics)
    else:
        doubled = [name for name in statistics if name not in LENGTHS]
        if doubled:
            raise TraceError(
                f"--{doubled[0]} states what --like measures; drop one of them"
            )
        # It reads the whole trace; stated statistics need none.
        model = model_like(like, quant)
        if save_stats is not None:
            save(model, save_stats)
        model = of_lengths(model, **statistics)
    if comparison is not None:
        comparison(model.likeness)

    # Traces may be larger than memory, so they are written while they are drawn.
    synthesise(model, target, tokens=int(tokens), seed=seed, progress=progress)
    return open_trace(target)


def _model_of(shape: ModelShape, seed: int, statistics: dict[str, Any]) -> SynthModel:
    """The statistics that ship of a model, unless others are stated, at the numbers of
    experts and layers that it has.
    """
    habits = [name for name in statistics if name not in LENGTHS]
    if habits or shape.name not in shipped_statistics():
        return stated(shape, seed=seed, **statistics)
    model = model_like(shape.name)
    lengths = {"prompt_tokens": 0, "new_tokens": 512} | statistics
    return of_lengths(replace(model, shape=shape), **lengths)
