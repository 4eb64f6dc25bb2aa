"""Routing recall: what similar tokens used is expected, kept and streamed."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.cache_driver import TimedView, admit, named, shape, swaps, victims, work

from moesim.policies.cache.recall import Recall as RecallCache
from moesim.policies.names import PREFILL
from moesim.policies.prefetch.recall import Recall as RecallPrefetch
from moesim.policies.routing_memory import RoutingMemory
from moesim.policies.run_context import RunContext

LAYERS = 3
EXPERTS = 4

step_of = partial(work, width=EXPERTS)


def run_context(experts=EXPERTS):
    return RunContext(shape(LAYERS, experts), 1, np.full(LAYERS, 1), "layer")


def layer_step(step, layer, expert):
    return step_of(step=step, layer=layer, experts=[expert], cpu_s=[4.0])


def walk(policy, tokens):
    """Show a cache tokens of one expert per layer; the last may be cut short."""
    for step, experts in enumerate(tokens):
        for layer, expert in enumerate(experts):
            policy.accessed(layer_step(step, layer, expert))


@pytest.fixture
def parts():
    """Cache and prefetcher of one run."""
    context = run_context()
    cache = RecallCache(recall=0.5, short=0.25, short_half_life=1, long_half_life=2)
    prefetch = RecallPrefetch()
    cache.start(context)
    prefetch.start(context)
    return cache, prefetch


def by_layer(scores):
    return np.reshape(scores, (LAYERS, EXPERTS))


def test_a_token_that_begins_as_another_is_expected_to_go_on_as_it_did(parts):
    cache, prefetch = parts
    walk(cache, [(0, 1, 2), (3, 2, 1), (0,)])

    keys = named(prefetch, layer_step(2, 0, 0), TimedView(LAYERS, EXPERTS))

    assert keys == [(1, 1), (2, 2)]
    coming = by_layer(cache.memory.coming)
    assert coming[1:].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


def test_what_came_after_a_similar_token_is_worth_keeping(parts):
    """After the token like this one, layer 0 used expert 3; by frequency, over half-lives
    of 1 and 2 tokens, expert 0 was used now and two tokens ago, expert 3 one ago. Both
    frequencies begin with two tokens without uses.

    Of what has followed, half is believed before it has been compared with uses: 5 parts
    in 10. The only comparison so far, of the second token's last layer, expected 1/3 by
    frequency and nothing by recall, of an expert that was not used. A copy of its own is
    bought by half of that.
    """
    cache, _ = parts
    walk(cache, [(0, 1, 2), (3, 2, 1), (0,)])

    assert by_layer(cache.memory.following)[0].tolist() == [0, 0, 0, 1]
    root = 0.5**0.5
    by_short = np.array([0.5 * (1 + 0.25), 0, 0, 0.5 * 0.5]) / (1 - 0.5**3 + 2 * 0.5)
    by_long = (1 - root) * np.array([1 + 0.5, 0, 0, root])
    by_long /= 1 - root**3 + 2 * (1 - root)
    lately = 0.25 * by_short + 0.75 * by_long
    weight = (5 + 1 / 9) / (10 + 1 / 9)
    more = weight * (np.array([0, 0, 0, 1]) - lately)
    assert by_layer(cache.memory.value)[0] == pytest.approx(lately + more)
    assert by_layer(cache.memory.copy_value)[0] == pytest.approx(lately + more / 2)


def test_a_prompt_counts_as_uses_of_its_tokens():
    """Of four tokens all used expert 0 and one expert 1: with a half-life of one token
    and two tokens without uses before, 15/16 of 4/4 and of 1/4.
    """
    cache = RecallCache(recall=0, short=1, short_half_life=1)
    cache.start(run_context())
    cache.accessed(step_of(experts=[0, 1], tokens=[4, 1], phase=PREFILL, rows=4))
    by_use = 15 / 16 / (15 / 16 + 2 * 0.5)
    values = by_layer(cache.memory.value)[0].tolist()
    assert values == pytest.approx([by_use, by_use / 4, 0, 0])


def test_a_pass_that_verifies_drafts_counts_as_its_tokens():
    """Of three tokens, half-lives of three tokens and of one pass: the pass before is
    worth half by either. A pass used expert 0, then one expert 1; two tokens and two
    passes without uses came before. At a margin of 0.15 for each token no copy pays.
    """
    cache = RecallCache(recall=0, short_half_life=3, long_half_life=1)
    cache.start(run_context())
    for step in range(2):
        cache.accessed(step_of(step=step, experts=[step], tokens=[3], rows=3))
    by_short = np.array([0.25, 0.5]) / (0.75 + 2 * (1 - 0.5 ** (1 / 3)))
    by_long = np.array([0.25, 0.5]) / (0.75 + 2 * 0.5)
    expected = 0.3 * by_short + 0.7 * by_long
    assert by_layer(cache.memory.copy_value)[0, :2] == pytest.approx(expected)
    assert cache.memory.margin == pytest.approx(3 * 0.15)


def test_broken_promises_end_the_streams():
    """One token is remembered, and the next one begins alike but never goes on so. Of 8
    promises taken to have been kept, 4 broken ones leave 8/12, 56 % of the way from
    chance, which would keep a quarter, to all; 6 leave 8/14, 43 %, less than `trust`.
    """
    prefetch = RecallPrefetch(history=2)
    prefetch.start(run_context())
    view = TimedView(LAYERS, EXPERTS)
    keys = []
    for step in range(6):
        later = step % EXPERTS
        keys.append(named(prefetch, layer_step(step, 0, 0), view))
        named(prefetch, layer_step(step, 1, later), view)
        named(prefetch, layer_step(step, 2, later), view)
    begun = [[(1, each), (2, each)] for each in range(3)]
    assert keys == [[], *begun, [], []]
    assert prefetch.memory.kept_promises() == pytest.approx(8 / (8 + 5 * 2))


def test_a_copy_that_would_come_too_late_is_not_named(parts):
    """A resident expert leaves the layer 1 s long; half a copy takes 1.5 s. What is two
    layers ahead begins at 2 s.
    """
    cache, prefetch = parts
    walk(cache, [(0, 1, 2), (3, 2, 1), (0,)])
    now = step_of(step=2, layer=0, experts=[0], cpu_s=[4.0], state=[2])

    assert named(prefetch, now, TimedView(LAYERS, EXPERTS)) == [(2, 2)]


def test_what_is_present_is_not_named(parts):
    cache, prefetch = parts
    walk(cache, [(0, 1, 2), (3, 2, 1), (0,)])
    view = TimedView(LAYERS, EXPERTS, resident=[(0, 1, 1)], in_flight=[(0, 2, 2)])
    assert named(prefetch, layer_step(2, 0, 0), view) == []


def test_a_prefetcher_alone_remembers_as_well(parts):
    """Beside another cache nobody else tells it of layer steps."""
    prefetch = RecallPrefetch()
    prefetch.start(run_context())
    view = TimedView(LAYERS, EXPERTS)
    for step, experts in enumerate([(0, 1, 2), (3, 2, 1), (0,)]):
        for layer, expert in enumerate(experts):
            keys = named(prefetch, layer_step(step, layer, expert), view)
    assert keys == [(1, 1), (2, 2)]


@pytest.mark.parametrize(("copy_s", "keys"), [(1.9, [(1, 1), (2, 2)]), (2.1, [])])
def test_a_copy_that_takes_more_of_the_cpu_than_it_saves_is_not_named(copy_s, keys):
    """Beside a copy, which takes twice its time, the CPU works at half speed: it loses
    what the copy takes alone. One use saves 2 s of it, and is expected for certain.
    """
    costs = SimpleNamespace(
        overlap=(2.0, 2.0),
        copy_s=lambda layer: copy_s,
        cpu_s=lambda layer, tokens: np.full(len(tokens), 2.0),
    )
    prefetch = RecallPrefetch()
    prefetch.start(replace(run_context(), costs=costs))
    view = TimedView(LAYERS, EXPERTS)
    for step, experts in enumerate([(0, 1, 2), (3, 2, 1), (0,)]):
        for layer, expert in enumerate(experts):
            named_last = named(prefetch, layer_step(step, layer, expert), view)
    assert named_last == keys


def test_parts_share_a_memory_if_they_ask_for_it_alike():
    context = run_context()
    memories = [RoutingMemory.of(context, history) for history in (4, 4, 5)]
    assert memories[0] is memories[1]
    assert memories[0] is not memories[2]
    assert RoutingMemory.of(run_context(), 4) is not memories[0]


def test_tokens_beyond_the_history_are_forgotten():
    cache = RecallCache(history=2)
    cache.start(run_context())
    walk(cache, [(0, 1, 2), (3, 2, 1), (0,)])
    # Only the token before is left; it shares nothing, and this one came after it.
    assert by_layer(cache.memory.following)[0].tolist() == [1, 0, 0, 0]


def test_what_is_fetched_anyway_stays_if_it_is_worth_more(parts):
    cache, _ = parts
    walk(cache, [(0, 1, 2), (0, 1, 2), (3,)])
    assert victims(cache, [1], [0]) == [-1]
    assert victims(cache, [0], [1]) == [1]


def test_what_the_cpu_computed_is_copied_if_it_is_worth_more_by_the_margin():
    """Used in one of two tokens, half-lives of one: worth 1/2 and 1/4 of what 3/4 and two
    tokens without uses make; the difference is 1/7.
    """
    view = TimedView(LAYERS, EXPERTS, resident=[(0, 0, 1)])
    swap = [((0, 1), (0, 0))]
    for margin, wanted in ((0.14, swap), (0.15, [])):
        cache = RecallCache(margin=margin, recall=0, short=1, short_half_life=1)
        cache.start(run_context())
        admit(cache, 1)
        walk(cache, [(1,)])
        now = step_of(step=1, layer=0, experts=[0])
        cache.accessed(now)
        assert swaps(cache, now, view) == wanted


def test_what_similar_tokens_tell_is_believed_once_it_has_come_true():
    """Three tokens in turn: of late each expert was used in a third of tokens."""
    cache = RecallCache()
    cache.start(run_context())
    walk(cache, [[1 + (step + n) % 3 for n in range(LAYERS)] for step in range(120)])
    coming = by_layer(cache.memory.value)[range(LAYERS), [1, 2, 3]]
    assert (coming > 0.9).all()


def test_one_expert_a_layer_stays_inside_its_arrays():
    """What a frequency has seen stood by layer and frequency in a row of L x E places:
    values of layers were read and written where others' stood.
    """
    several, single = (RecallCache(), RecallCache())
    several.start(run_context())
    single.start(run_context(experts=1))
    for step in range(8):
        for layer in range(LAYERS):
            several.accessed(layer_step(step, layer, 0))
            single.accessed(work(step=step, layer=layer, experts=[0], width=1))
    of_several = by_layer(several.memory.value)[:, 0].tolist()
    assert list(single.memory.value) == of_several


def test_the_system_charges_the_time_that_both_parts_take(parts):
    """2.2 µs, and 15.5 ns for each expert of a layer."""
    own_s = sum(policy.own_planning_s for policy in parts)
    assert own_s == pytest.approx(2.2e-6 + EXPERTS * 15.5e-9)
