"""How much drawn routing is like real routing that the fit had not seen, by curves.

``python -m benchmarks.likeness`` prints three tables, of which words choose some:
``shipped`` (statistics that ship), ``one-text`` (fitted to one text of a model of which
there are others) and ``stated`` (habits of other models, stated by nothing but sizes).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.replay_speed import SHARED
from benchmarks.ship_statistics import FOREIGN, OURS, source_of
from moesim.traces.format.reader import Trace, open_trace
from moesim.traces.format.schema import Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.stats.routing_curves import (
    Curves,
    Likeness,
    mean_curves,
    routing_curves,
)
from moesim.traces.stats.statistics import joint_counts, mutual_information_bits
from moesim.traces.synthetic.draw import SynthModel, draw
from moesim.traces.synthetic.fit import fit
from moesim.traces.synthetic.generate import stated
from moesim.traces.synthetic.saved import model_like, shipped_statistics

TEXTS = 5
TEXT_TOKENS = 300
COMPARED = 32


def pair_bits(trace: Trace, gap: int, sequences: int = 40) -> np.ndarray:
    """Plug-in bits between every two layers `gap` apart, over the generated tokens of
    the first sequences.

    Returns:
        float64 [L - gap].
    """
    routing = np.concatenate(routing_of(trace)[:sequences])
    joint = joint_counts(routing, trace.shape.experts, gap)
    return np.array([mutual_information_bits(table) for table in joint])


def routing_of(trace: Trace) -> list[np.ndarray]:
    """Generated tokens of each sequence, int64 [T, L, K]."""
    parts = []
    for rows in trace.sequences():
        decode = rows.experts[rows.phase == Phase.DECODE].astype(np.int64)
        parts.append(decode.reshape(-1, trace.shape.layers, trace.shape.top_k))
    return parts


def one_text(name: str, folder: Path) -> Likeness:
    """Fit to single texts of a trace, and compare with all others of it."""
    trace = open_trace(source_of(name, folder))
    texts = routing_of(trace)
    long = [n for n, text in enumerate(texts) if len(text) >= 64]
    chosen = [long[int(n)] for n in np.linspace(0, len(long) - 1, TEXTS)]
    others = [text for n, text in enumerate(texts) if n not in chosen]

    drawn = []
    for number in chosen:
        alone = folder / "one.parquet"
        with TraceWriter(alone, TraceHeader(trace.shape)) as writer:
            text = texts[number][:TEXT_TOKENS].astype(np.uint16)
            tokens, layers, top_k = text.shape
            writer.write(
                seq=0,
                pos=np.repeat(np.arange(tokens), layers),
                phase=Phase.DECODE,
                layer=np.tile(np.arange(layers), tokens),
                experts=text.reshape(-1, top_k),
            )
        drawn.append(_drawn(fit(open_trace(alone)), others))
    real = routing_curves(others, trace.shape.experts)
    return Likeness(real, mean_curves(drawn), left_out=len(others))


def by_statement(name: str, folder: Path) -> Likeness:
    """State nothing but the sizes of a model, and compare with all that is real."""
    trace = open_trace(source_of(name, folder))
    texts = routing_of(trace)
    drawn = _drawn(stated(trace.shape), texts)
    real = routing_curves(texts, trace.shape.experts)
    return Likeness(real, drawn, left_out=len(texts))


def _drawn(model: SynthModel, texts: list[np.ndarray]) -> Curves:
    """Curves of as many sequences of the same lengths."""
    lengths = [min(len(text), 256) for text in texts[:COMPARED]]
    made = draw(model, max(lengths), len(lengths), np.random.default_rng(0))
    parts = [part[:length] for part, length in zip(made, lengths, strict=True)]
    return routing_curves(parts, model.shape.experts)


def report(tables: list[str]) -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "shipped" in tables:
            for model in shipped_statistics():
                _print(model, model_like(model).likeness)
        if not SHARED.is_dir():
            print("the other tables need the traces beside this checkout")
            return
        if "one-text" in tables:
            for model in ("gpt-oss-20b", "deepseek-v2-lite"):
                _print(f"{TEXTS} single texts of {model}", one_text(model, folder))
        if "stated" in tables:
            for model in (*FOREIGN, *OURS):
                _print(f"stated, {model}", by_statement(model, folder))


def _print(title: str, likeness: Likeness) -> None:
    differences = np.abs(list(likeness.differences().values()))
    print(title)
    print("\n".join(likeness.lines()))
    print(f"  median difference: {100 * np.median(differences):.1f} points", flush=True)


if __name__ == "__main__":
    report(sys.argv[1:] or ["shipped", "one-text", "stated"])
