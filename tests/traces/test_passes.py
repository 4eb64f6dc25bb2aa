"""What forward passes hold: micro-batches of a prompt, and drafts that are verified."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_driver import ListFuture
from support.handmade import HandCosts, hand_trace, plan_of, run, shape, spans

from moesim import replay
from moesim.base.errors import TraceError
from moesim.base.options import ConfigError
from moesim.policies.systems import SYSTEMS, compose
from moesim.traces.format.batch import (
    RoutedLayer,
    RoutedStep,
    micro_batches,
)
from moesim.traces.format.batch import compose as compose_steps
from moesim.traces.format.reader import Passes
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.metrics import summarise
from moesim.traces.timeline.spans import Timeline

LAYERS = 3


# -- micro-batches ----------------------------------------------------------------------


def test_a_prompt_of_five_tokens_in_micro_batches_of_two(tmp_path):
    """Tokens 0-1, 2-3 and 4; each goes through all layers. Token t uses expert t."""
    routing = [[[token]] * LAYERS for token in range(7)]
    trace = hand_trace(tmp_path / "t.parquet", routing, prompt=5)
    walk = list(compose_steps(trace.cut(Passes(micro_batch_tokens=2))))
    assert [step.phase for step in walk] == [Phase.PREFILL] * 3 + [Phase.DECODE] * 2
    assert [step.tokens for step in walk] == [2, 2, 1, 1, 1]
    assert [step.context_tokens for step in walk] == [2, 4, 5, 6, 7]
    assert [step.step for step in walk] == list(range(5))
    for step, used in zip(walk[:3], ([0, 1], [2, 3], [4]), strict=True):
        assert [layer.experts.tolist() for layer in step.layers] == [used] * LAYERS


def test_prompts_of_a_batch_are_cut_side_by_side():
    """Five and two tokens, four at once: two of each, then the rest of the first."""
    assert list(micro_batches([5, 2], 4)) == [[(0, 2), (0, 2)], [(2, 5), (2, 2)]]
    # Three prompts, two tokens at once: the third waits.
    parts = list(micro_batches([1, 1, 1], 2))
    assert parts == [[(0, 1), (0, 1), (0, 0)], [(1, 1), (1, 1), (0, 1)]]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 50))
def test_micro_batches_hold_every_token_once_and_never_too_many(tokens, most):
    done = [0] * len(tokens)
    for part in micro_batches(tokens, most):
        assert 0 < sum(stop - start for start, stop in part) <= most
        for n, (start, stop) in enumerate(part):
            assert start == done[n]
            done[n] = stop
    assert done == tokens


def test_the_first_token_comes_when_the_last_micro_batch_has_ended():
    """Passes of 3, 3 and 2 s, then two tokens of 1 s each."""
    timeline = Timeline(("cpu",))
    end_s = 0.0
    passes = [(Phase.PREFILL, 4, 3.0), (Phase.PREFILL, 4, 3.0), (Phase.PREFILL, 2, 2.0)]
    for n, (phase, tokens, seconds) in enumerate(
        [*passes, *[(Phase.DECODE, 1, 1.0)] * 2]
    ):
        timeline.step(n, phase, 0, tokens, 1, end_s, end_s + seconds)
        end_s += seconds
    metrics = summarise(timeline)
    assert metrics["ttft_s"] == 8.0
    assert metrics["tpot_s"] == 1.0
    assert metrics["prefill_tokens_per_s_seq"] == 10 / 8


def llama_cpp_s(tmp_path, micro_batch, tokens=64):
    """Seconds of a prompt that uses all four experts of three layers."""
    routing = [[[token % 4]] * LAYERS for token in range(tokens)]
    trace = hand_trace(tmp_path / "t.parquet", routing, experts=4, prompt=tokens)
    system = SYSTEMS["llama.cpp"]
    planner = plan_of(trace.shape, system, scope="global", ratio=1 / 3, staging=4)
    walk = compose_steps(trace.cut(Passes(micro_batch_tokens=micro_batch)))
    result, timeline = run(planner, walk)
    return result.makespan_s, len(spans(timeline, "fetch"))


@pytest.mark.parametrize(("micro_batch", "seconds", "uploads"), [
    # As one: two layers of 2 + 4 x 4 + 4 x 1, and the last, on the GPU, of 2 + 4.
    (None, 50, 8),
    (64, 50, 8),
    # Two halves of 32 tokens: both upload, and take as long as the whole.
    (32, 2 * 50, 16),
    # 31 are computed on the CPU: two layers of 2 + 4 x 10, and 2 + 4. So are the
    # last 2, of two experts: 2 + 2 x 10 twice, and 2 + 2.
    (31, 2 * 90 + 48, 0),
])  # fmt: skip
def test_llama_cpp_uploads_once_per_micro_batch(
    tmp_path, micro_batch, seconds, uploads
):
    assert llama_cpp_s(tmp_path, micro_batch) == (seconds, uploads)


def test_micro_batches_are_an_option_of_every_run(tmp_path):
    """llama.cpp takes 512 tokens at once, unless it is told otherwise."""
    routing = [[[token % 4]] * LAYERS for token in range(9)]
    trace = hand_trace(tmp_path / "t.parquet", routing, experts=4, prompt=8)
    options = {"hw": "rtx3090-epyc7532", "cache_ratio": 0.5}
    whole = replay(trace, "llama.cpp", **options)
    assert (whole.config["micro_batch"], whole.metrics["steps"]) == (512, 2)
    halves = replay(trace, "llama.cpp", micro_batch=4, **options)
    assert (halves.config["micro_batch"], halves.metrics["steps"]) == (4, 3)
    # Both engines walk through the same passes.
    times = {
        engine: replay(trace, "greedy", micro_batch=3, engine=engine, **options).metrics
        for engine in ("simpy", "fast")
    }
    assert times["simpy"]["steps"] == 4
    assert times["simpy"]["ttft_s"] == times["fast"]["ttft_s"]


# -- drafts -----------------------------------------------------------------------------


@pytest.mark.parametrize(("acceptance", "passes"), [
    # All right: three tokens of a pass are kept, and two more to the end.
    (1.0, [(0, 3, 3), (3, 2, 2)]),
    # All wrong: each pass keeps the one that it makes itself.
    (0.0, [(0, 3, 1), (1, 3, 1), (2, 3, 1), (3, 2, 1), (4, 1, 1)]),
])  # fmt: skip
def test_five_tokens_with_two_drafted_at_once(acceptance, passes):
    cut = Passes(draft_tokens=2, acceptance=acceptance)
    assert list(cut.verified(5)) == passes


def test_tokens_per_pass_are_those_of_a_truncated_geometric_series():
    """1 + a + a² + a³ for three drafted tokens."""
    acceptance = 0.7
    kept = [
        kept
        for _, _, kept in Passes(draft_tokens=3, acceptance=acceptance).verified(40_000)
    ]
    assert sum(kept) == 40_000
    expected = sum(acceptance**n for n in range(4))
    assert np.mean(kept) == pytest.approx(expected, rel=0.02)


def test_each_sequence_has_draws_of_its_own():
    """Whether one guesses right says nothing of the next; a sequence always repeats."""
    passes = Passes(draft_tokens=3, acceptance=0.5, seed=1)
    kept = [
        [kept for *_, kept in passes.verified(200, sequence)] for sequence in (0, 1, 1)
    ]
    assert kept[0] != kept[1]
    assert kept[1] == kept[2]


def test_a_pass_uses_the_experts_of_all_its_tokens(tmp_path):
    """Tokens use experts 0 to 4; three at once, all kept."""
    routing = [[[token]] * LAYERS for token in range(6)]
    trace = hand_trace(tmp_path / "t.parquet", routing, prompt=1)
    cut = trace.cut(Passes(draft_tokens=2))
    prompt, first, second = compose_steps(cut)
    assert (prompt.tokens, prompt.drafted, prompt.made) == (1, 0, 1)
    assert (first.tokens, first.drafted, first.made, first.sequences) == (3, 2, 3, 1)
    assert first.layers[2].experts.tolist() == [1, 2, 3]
    assert first.layers[2].routing.tolist() == [[1], [2], [3]]
    assert second.layers[0].experts.tolist() == [4, 5]
    assert (first.context_tokens, second.context_tokens) == (4, 6)
    with pytest.raises(TraceError, match="one sequence at a time"):
        compose_steps(cut, batch=2)


def verifying(*tokens, kept):
    """One pass over tokens, each with its expert in every layer."""
    layers = []
    for layer in range(LAYERS):
        routing = np.array([[token[layer]] for token in tokens], np.uint16)
        used, counts = np.unique(routing, return_counts=True)
        layers.append(
            RoutedLayer(
                layer=layer,
                experts=used.astype(np.int32),
                tokens=counts.astype(np.int32),
                routing=routing,
                weights=None,
                scores=None,
                predicted={},
            )
        )
    count = len(tokens)
    return RoutedStep(
        0, Phase.DECODE, 0, count, count, 1, layers, drafted=count - 1, kept=kept
    )


@pytest.mark.parametrize(("prefetch", "seconds", "prefetched"), [
    # Drafting takes 3 x (2 + 1). Then layers on demand: 2 + 4 + 1 = 7 twice, and
    # two copies in the last, 2 + 8 + 1.
    ("none", 9 + 7 + 7 + 11, []),
    # The draft has read the first token: its experts are copied 9-13-17-21. Layer
    # 0: dense part to 11, product 13-14. Layer 1: 16, 17-18. Layer 2: 20, one copy
    # ends at 21, the one for the second token at 25, product to 26.
    ("moe-speq:accuracy=1", 26, [(0, 9, 13), (1, 13, 17), (2, 17, 21)]),
    # Three copies do not end before another token is drafted, two do. Layer 2:
    # dense part to 20, copies to 28, product to 29.
    ("sp-moe:accuracy=1", 29, [(0, 9, 13), (1, 13, 17)]),
    ("sp-moe:accuracy=1,cutoff=1", 9 + 2 + 2 + 1 + 7 + 11, [(0, 9, 13)]),
])  # fmt: skip
def test_drafted_tokens_make_their_experts_come_early(prefetch, seconds, prefetched):
    """Two tokens with experts 0, 1, 2 and 0, 1, 3 in three layers, an empty cache."""
    system = compose("sp-moe", prefetch=prefetch)
    future = ListFuture([])
    planner = plan_of(shape(layers=LAYERS), system, slots=2, future=future)
    result, timeline = run(planner, [verifying((0, 1, 2), (0, 1, 3), kept=2)])
    assert result.makespan_s == seconds
    copies = [span[1:] for span in spans(timeline, "prefetch")]
    assert copies == prefetched
    # Both tokens were kept.
    metrics = summarise(timeline)
    assert metrics["decode_tokens"] == 2
    assert metrics["tpot_s"] == seconds / 2


def test_a_draft_of_all_experts_costs_all_experts():
    """MoE-SpeQ drafts with the model itself: top 2 of three layers, 3 x (2 + 2 x 1)."""
    system = compose("moe-speq", prefetch="none")
    planner = plan_of(shape(layers=LAYERS, top_k=2), system, HandCosts(copy=0.0))
    _, timeline = run(planner, [verifying((0, 1, 2), (0, 1, 3), kept=1)])
    assert spans(timeline, "dense")[0] == ("gpu0", -1, 0, 12)


def test_a_wrong_draft_prefetches_other_experts():
    system = compose("sp-moe", prefetch="moe-speq:accuracy=0")
    planner = plan_of(
        shape(layers=LAYERS), system, slots=2, future=ListFuture([]), seed=3
    )
    _, timeline = run(planner, [verifying((0, 1, 2), (0, 1, 2), kept=1)])
    wrong = timeline.frame().query("kind == 'prefetch'")
    assert len(wrong)
    assert not any(
        expert == layer
        for layer, expert in zip(wrong["layer"], wrong["expert"], strict=True)
    )


def test_speculation_makes_every_token_of_the_trace(tmp_path):
    """Whatever is accepted, the tokens are those of the trace; the fewer, the slower."""
    routing = [[[token % 8]] * LAYERS for token in range(40)]
    trace = hand_trace(tmp_path / "t.parquet", routing, prompt=2)
    options = {"hw": "rtx3090-epyc7532", "cache_ratio": 0.5}
    tpot_s = []
    for acceptance in (0.0, 1.0):
        for policy in ("sp-moe", "moe-speq"):
            run = replay(trace, policy, acceptance=acceptance, **options)
            assert run.metrics["decode_tokens"] == 38
            assert run.config["draft_tokens"] == 4
            tpot_s.append(run.metrics["tpot_s"])
    assert min(tpot_s[:2]) > max(tpot_s[2:])
    # Without drafts it is one pass for each token.
    plain = replay(trace, "sp-moe", draft_tokens=0, **options)
    assert plain.metrics["steps"] == 39
    batch = replay(trace, "sp-moe", batch=2, **options)
    assert batch.config["draft_tokens"] == 0
    assert any("without drafts" in warning for warning in batch.warnings)
    with pytest.raises(ConfigError, match="cannot draft"):
        replay(trace, "sp-moe", prefetch="none", arrivals="poisson:1", **options)
