"""Hypothesis strategies for small models and traces, shared by all invariants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from support.cache_driver import work

from moesim.hwprofiles.lanes import lane_names
from moesim.policies.names import IN_FLIGHT, RESIDENT
from moesim.traces.format.schema import ModelShape, Phase, TraceHeader
from moesim.traces.format.writer import TraceWriter


@st.composite
def shapes(draw, max_layers=3, max_experts=8):
    """Models of a few layers and experts; bytes per expert may differ by layer, and
    within a layer.
    """
    layers = draw(st.integers(1, max_layers))
    experts = draw(st.integers(2, max_experts))
    shape = ModelShape(
        name="drawn",
        layers=layers,
        experts=experts,
        top_k=draw(st.integers(1, min(3, experts))),
        hidden=64,
        expert_intermediate=32,
        expert_bytes=tuple(
            draw(
                st.lists(
                    st.sampled_from([1 << 18, 1 << 20]),
                    min_size=layers,
                    max_size=layers,
                )
            )
        ),
        other_bytes=1 << 20,
    )
    if draw(st.sampled_from([False, False, True])):
        size = st.sampled_from([1 << 18, 1 << 19, (1 << 19) + 3, 1 << 20])
        layer = st.lists(size, min_size=experts, max_size=experts)
        sizes = draw(st.lists(layer, min_size=layers, max_size=layers))
        shape = shape.with_bytes_by_expert(sizes)
    return shape


@st.composite
def worker_tables(draw, gpus=1):
    """Any lanes on one worker, in any order: a profile's table of workers."""
    lanes = draw(st.permutations(lane_names(gpus)))
    numbers = st.lists(
        st.integers(0, len(lanes) - 1), min_size=len(lanes), max_size=len(lanes)
    )
    table = {}
    for number, lane in zip(draw(numbers), lanes, strict=True):
        table[f"w{number}"] = (*table.get(f"w{number}", ()), lane)
    return table


@dataclass(frozen=True)
class DrawnTrace:
    """Routing by token: `sequences` holds (prompt tokens, experts int [tokens, L, K])
    pairs.
    """

    shape: ModelShape
    sequences: tuple[tuple[int, np.ndarray], ...]

    def write(self, path, columns=()):
        """Write it as a trace file; `columns` are drawn, one number per expert, or per
        chosen one.
        """
        layers = self.shape.layers
        rng = np.random.default_rng(0)

        def width(name):
            return self.shape.top_k if name == "weights" else self.shape.experts

        with TraceWriter(path, TraceHeader(self.shape), columns) as writer:
            for seq, (prompt, experts) in enumerate(self.sequences):
                tokens = len(experts)
                pos = np.repeat(np.arange(tokens), layers)
                phase = np.where(pos < prompt, Phase.PREFILL, Phase.DECODE)
                writer.write(
                    seq,
                    pos,
                    phase,
                    np.tile(np.arange(layers), tokens),
                    experts.reshape(-1, self.shape.top_k),
                    **{
                        # Few values, so that there are ties.
                        name: rng.integers(0, 8, (tokens * layers, width(name))) / 8
                        for name in columns
                    },
                )
        return path


@st.composite
def traces(draw, max_sequences=3, max_prompt=3, max_decode=6, **options):
    """Traces of up to `max_sequences` sequences, each with at least one token; prompts
    may be empty.
    """
    shape = draw(shapes(**options))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = []
    for _ in range(draw(st.integers(1, max_sequences))):
        prompt = draw(st.integers(0, max_prompt))
        tokens = prompt + draw(st.integers(0 if prompt else 1, max_decode))
        ranked = rng.random((tokens, shape.layers, shape.experts)).argsort(axis=2)
        sequences.append((prompt, ranked[:, :, : shape.top_k]))
    return DrawnTrace(shape, tuple(sequences))


_SECONDS = st.integers(1, 40).map(lambda n: n * 1e-4)
_ONE = st.just(1)


@st.composite
def layer_works(draw, most=6, gpus=_ONE):
    """A layer step: residents, copies under way and absent experts, all copies of a link
    alike, perhaps behind one that is under way.
    """
    g = draw(gpus)
    a = draw(st.integers(1, most))
    times = st.lists(_SECONDS, min_size=a, max_size=a)
    copy_s = draw(_SECONDS)
    states = draw(
        st.lists(
            st.lists(st.integers(0, 2), min_size=a, max_size=a), min_size=g, max_size=g
        )
    )
    wait_s = draw(st.lists(st.just(0.0) | _SECONDS, min_size=g, max_size=g))
    arrive_s = [
        [
            0.0
            if s == RESIDENT
            else min(draw(_SECONDS), wait or np.inf)
            if s == IN_FLIGHT
            else wait + copy_s
            for s in row
        ]
        for row, wait in zip(states, wait_s, strict=True)
    ]
    return work(
        cpu_s=draw(times),
        gpu_s=[draw(times)] * g,
        arrive_s=arrive_s,
        host_s=draw(st.one_of(st.just([0.0] * a), times)),
        state=np.max(states, axis=0),
        gpu_state=states,
        link_s=wait_s,
        first_cpu_s=draw(st.sampled_from([0.0, 5e-4])),
    )
