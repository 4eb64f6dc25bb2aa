"""The field's prefetch policies: worked examples, what they learn, and what they may
know.
"""

import itertools
from functools import partial

import numpy as np
import pytest
from support.cache_driver import LayerStep, ListFuture, View, named, shape, work

from moesim.policies.arrays import view_of
from moesim.policies.assignment._list_scheduler import ListScheduler
from moesim.policies.base import PolicyError
from moesim.policies.names import PREFILL, RESIDENT
from moesim.policies.prefetch.activation_matrix import ActivationMatrix
from moesim.policies.prefetch.clairvoyant import Clairvoyant
from moesim.policies.prefetch.finemoe import FineMoE
from moesim.policies.prefetch.first_missing import FirstMissing
from moesim.policies.prefetch.hybrimoe_released import HybriMoEReleased
from moesim.policies.prefetch.impact import Impact
from moesim.policies.prefetch.noisy_oracle import NoisyOracle
from moesim.policies.prefetch.partial_hidden import PartialHidden
from moesim.policies.prefetch.pre_gated import PreGated
from moesim.policies.prefetch.random import RandomPrefetch
from moesim.policies.prefetch.statistical import Statistical, Transitions
from moesim.policies.prefetch.whole_layer import WholeLayer
from moesim.policies.run_context import RunContext


def started(policy, layers, experts, *, top_k=1, seed=0, **extras):
    sizes = shape(layers, experts, top_k)
    slots = np.zeros(layers, int)
    policy.start(RunContext(sizes, 1, slots, "layer", seed=seed, extras=extras))
    return policy


def experts(keys):
    return [expert for _, expert in keys]


HybriMoEView = partial(View, copy_s=3.0, gap_s=100.0)
"""The reference's arbitrary units: CPU 1 per token, GPU 1 per expert, copy 3.

The dense part is so long that whatever starts lands before its layer.
"""


def impact(view, *scores, busy_s=10.0, **parameters):
    """What is named behind a layer of one token, whose expert keeps the GPU busy;
    `scores` [T, E] of the coming layers, nearest first.
    """
    policy = started(Impact(**parameters), view.layers, view.experts)
    columns = {f"pred{ahead}_raw": rows for ahead, rows in enumerate(scores, start=1)}
    now = work(
        experts=[0], cpu_s=[99], gpu_s=[busy_s], state=[RESIDENT], width=view.experts
    )
    return named(policy, now, view, predicted=columns)


def tokens_for(loads, width):
    """Top-1 scores of as many tokens as `loads` ({expert: tokens}) ask for."""
    rows = [expert for expert, count in loads.items() for _ in range(count)]
    return np.eye(width)[rows]


# -- statistical -----------------------------------------------------------------------


def test_section_6_7_statistical_table():
    """P(.|0) = (.7, .2, .1), P(.|1) = (.1, .6, .3); tokens choose 0, 1, 1: workloads
    .9, 1.4, .7, so expert 1.
    """
    table = np.zeros((2, 3, 3))
    table[0, :2] = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]
    now = work(experts=[0, 1], tokens=[1, 2], width=3)
    for size, expected in ((1, [1]), (3, [1, 0, 2])):
        policy = started(Statistical(size=size), 2, 3, transitions=table)
        assert experts(named(policy, now, View(2, 3))) == expected


def test_pairs_of_two_layers_are_counted_as_one_by_one():
    """A token's estimate is the mean over its pairs that were seen, or, without one,
    that of its last layer alone; unused columns are no experts.
    """
    rng = np.random.default_rng(0)
    # How often each expert of the middle layer was followed, of the tokens without
    # pairs: a table is not counted on.
    table = rng.integers(0, 3, (3, 5, 5)) / 3
    policy = started(Statistical(preceding=2, size=5), 3, 5, transitions=table)
    view = View(3, 5)
    followers, seen = {}, {}
    for step, tokens in enumerate((1, 4, 30)):
        first, second, after = (
            np.array([rng.permutation(5)[:2] for _ in range(tokens)], np.uint16)
            for _ in range(3)
        )
        second[rng.random(second.shape) < 0.1] = 65535
        expected = np.zeros(5)
        for a, b in zip(first, second, strict=True):
            met = [pair for pair in itertools.product(a, b) if pair in seen]
            for pair in met:
                expected += followers[pair] / seen[pair] / len(met)
            if not met:
                expected += sum(table[1, expert] for expert in b[b < 5])
        for layer, routing in enumerate((first, second, after)):
            active = np.unique(routing[routing < 5])
            now = work(experts=active, step=step, layer=layer, width=5)
            keys = named(policy, now, view, routing=routing)
            if layer == 1:
                values = expected[experts(keys)]
                assert len(values) == np.count_nonzero(expected)
                assert (np.diff(values) < 1e-9).all()
        for a, b, c in zip(first, second, after, strict=True):
            for pair in itertools.product(a, b[b < 5]):
                followers.setdefault(pair, np.zeros(5))[c] += 1
                seen[pair] = seen.get(pair, 0) + 1


def test_the_online_table_counts_token_by_token_and_only_the_past():
    """Of the tokens that chose 0, two went on to 2 and one to 1; of 0's and 3's tokens
    only neighbours count.
    """
    policy = started(Statistical(size=2, table="online"), 2, 4)
    view = View(2, 4)
    first = work(experts=[0, 3], tokens=[3, 1], width=4)
    assert not named(policy, first, view, routing=[[0], [0], [0], [3]])
    second = work(experts=[1, 2], tokens=[2, 2], layer=1, width=4)
    named(policy, second, view, routing=[[2], [1], [2], [1]])
    for expert, expected in ((0, [2, 1]), (3, [1])):
        again = work(experts=[expert], step=1, width=4)
        assert experts(named(policy, again, view, routing=[[expert]])) == expected


def test_the_online_table_skips_what_does_not_follow():
    """Another step, or a ragged prefill layer with other tokens, teaches nothing."""
    policy = started(Statistical(table="online"), 2, 4)
    view = View(2, 4)
    named(policy, work(experts=[0], width=4), view, routing=[[0]])
    later = work(experts=[1], step=1, layer=1, width=4)
    named(policy, later, view, routing=[[1]])
    ragged = work(experts=[0], tokens=[2], step=2, width=4)
    named(policy, ragged, view, routing=[[0], [0]])
    named(policy, work(experts=[1], step=2, layer=1, width=4), view, routing=[[1]])
    last = work(experts=[0], step=3, width=4)
    assert not named(policy, last, view, routing=[[0]])


def test_transition_rows_sum_to_top_k_and_ignore_unused_places():
    table = Transitions(2, 4)
    before = view_of([[0, 1], [0, 65535]], np.uint16)
    table.observe(0, before, view_of([[2, 3], [3, 1]], np.uint16))
    assert table.table()[0, 0].tolist() == [0, 0.5, 0.5, 1]
    assert table.table()[0, 1].tolist() == [0, 0, 1, 1]
    assert table.table().sum(axis=2)[0].tolist() == [2, 2, 0, 0]
    workload = table.workload(0, np.array([0, 1]), np.array([2, 1]))
    assert workload.tolist() == [0, 1, 2, 3]


def test_a_missing_or_misshapen_table_is_named():
    with pytest.raises(
        PolicyError, match="table=calibrated needs a calibration; found none"
    ):
        started(Statistical(table="calibrated"), 2, 3)
    with pytest.raises(PolicyError, match=r"expected shape \(2, 3, 3\), got \(3, 3\)"):
        started(Statistical(), 2, 3, transitions=np.zeros((3, 3)))


# -- impact ----------------------------------------------------------------------------


def test_section_4_4_impact_prefetches_p():
    """Loads P3, Q2, R1 absent: makespan 4. With P there 3, with Q or R still 4: P is
    worth 1, the others nothing.

    With P there Q is worth 1 too (GPU P, Q to 2, CPU R to 1), then R nothing.
    """
    tokens = tokens_for({0: 3, 1: 2, 2: 1}, 4)
    view = HybriMoEView(2, 4)
    assert impact(view, tokens, depth=1, size=1) == [(1, 0)]
    assert impact(view, tokens, depth=1) == [(1, 0), (1, 1)]


def test_impact_prefers_the_larger_gain_and_nearer_layers_in_ties():
    """Layer 1 holds one absent expert of load 2 (2 on the CPU, 1 if present), layers 2
    and 3 one of load 3 (3, 1).
    """
    one = tokens_for({3: 2}, 4)
    two = tokens_for({1: 3}, 4)
    three = tokens_for({2: 3}, 4)
    view = HybriMoEView(4, 4)
    for parameters, expected in (
        ({}, [(2, 1), (3, 2), (1, 3)]),
        ({"discount": 0.4}, [(1, 3), (2, 1), (3, 2)]),
        ({"depth": 1}, [(1, 3)]),
        ({"size": 1}, [(2, 1)]),
    ):
        assert impact(view, one, two, three, **parameters) == expected


def test_impact_wants_only_what_the_link_could_start_before_the_layer_ends():
    """This layer ends after 7 by simulation. Copies of 3 could start at 0, 3 and 6;
    behind 5 s of queue only one.
    """
    loads = [tokens_for({e: 9}, 4) for e in range(3)]
    for queue_s, expected in ((0.0, 3), (1.0, 2), (5.0, 1), (7.0, 0)):
        view = HybriMoEView(4, 4, link_wait_s=queue_s)
        assert len(impact(view, *loads, busy_s=7.0)) == expected


def wanted_by_definition(view, tokens, busy_s):
    """Every absent expert of layer 1 is tried, one after the other; ties go to the
    higher load, then to the lower id.
    """
    ids = np.flatnonzero(tokens)
    loads = tokens[ids].astype(np.int32)
    schedule = ListScheduler(1, len(ids))
    schedule.sort(loads.data, len(ids))
    schedule.cpu_s = (1.0 * loads).data
    schedule.gpu_s = np.ones((1, len(ids))).data
    copy_s = view.copy_s[1]
    present = view.resident(1)[ids]
    arrive_s = np.where(present, 0.0, copy_s)
    flying = np.zeros(len(ids), np.uint8)

    def makespan_s():
        schedule.link_s[0] = 0.0
        schedule.arrive_s = arrive_s[None].copy().data
        schedule.flying = flying[None].copy().data
        room = np.zeros(len(ids), np.int8), np.zeros(len(ids), np.int64)
        return schedule.simulate(len(ids), 0.0, *(each.data for each in room))

    keys = []
    for start_s in np.arange(0.0, busy_s, copy_s):
        begins_s = busy_s + view.gap_s
        left_s = max(0.0, start_s + copy_s - begins_s)
        before_s = makespan_s()
        gains = {}
        for n in np.flatnonzero((arrive_s > 0.0) & (flying == 0)):
            arrive_s[n], flying[n] = left_s, left_s > 0.0
            gains[n] = round(before_s - makespan_s(), 9)
            arrive_s[n], flying[n] = copy_s, 0
        best = min(gains, key=lambda n: (-gains[n], -loads[n], n), default=None)
        if best is None or gains[best] <= 0.0:
            break
        keys.append((1, int(ids[best])))
        arrive_s[best], flying[best] = left_s, left_s > 0.0
    return keys + [(1, int(e)) for e in ids[present]] if keys else []


def test_impact_tries_every_expert_where_copies_are_under_way():
    """Experts of one load stood for each other by their lowest id; where a copy is
    under way when the layer begins, the order of equal loads makes a difference.
    """
    rng = np.random.default_rng(0)
    late = 0
    for _ in range(400):
        width = int(rng.integers(3, 9))
        tokens = rng.integers(0, 4, width)
        resident = {(0, 1, int(e)) for e in np.flatnonzero(rng.random(width) < 0.3)}
        copy_s = float(rng.choice([0.5, 1.0, 1.5, 2.0, 3.0]))
        gap_s = float(rng.choice([0.0, 0.25, 1.0]))
        view = View(2, width, resident=resident, copy_s=copy_s, gap_s=gap_s)
        busy_s = float(rng.choice([0.5, 1.0, 2.5, 4.0]))
        keys = impact(
            view, tokens_for(dict(enumerate(tokens)), width), busy_s=busy_s, depth=1
        )
        assert keys == wanted_by_definition(view, tokens, busy_s)
        late += busy_s + gap_s < copy_s * len(keys)
    assert late > 100


# -- hybrimoe-released, first-missing, partial-hidden, random, whole-layer -------------


def test_section_4_4_the_release_ranks_by_recent_scores_without_asking_a_gate():
    """Layer 1 scored expert 3 highest, then 1, in the last step; layer 0 of the next
    step wants these two.
    """
    policy = started(HybriMoEReleased(size=2), 2, 4)
    view = View(2, 4)

    def first(view, **more):
        """What layer 0 of the next step names."""
        now = work(**{"experts": [0], "step": 1, "width": 4} | more)
        return experts(named(policy, now, view))

    # The second row is not looked at.
    scores = [[0.1, 0.3, 0.2, 0.4], [0.9, 0.0, 0.1, 0.0]]
    before = work(experts=[3], layer=1, state=[RESIDENT], scores=scores, width=4)
    named(policy, before, view)
    assert first(view, state=[RESIDENT]) == [3, 1]
    assert first(View(2, 4, resident={(0, 1, 3)}), state=[RESIDENT]) == [1]
    # Nothing of this layer is on the GPU.
    assert first(view) == []
    assert first(view, state=[RESIDENT], phase=PREFILL) == []


def test_section_6_8_only_the_first_missing_is_loaded():
    """Top 2 is 2, 0: with 2 resident it is 0, with both nothing, never the third."""
    policy = started(FirstMissing(), 2, 3)

    def missing(resident, **more):
        view = View(2, 3, resident={(0, 1, e) for e in resident}, top_k=2)
        now = work(experts=[0], width=3, **more)
        columns = {"pred1_raw": [[0.3, 0.1, 0.6]]}
        return experts(named(policy, now, view, predicted=columns))

    assert missing([]) == [2]
    assert missing([2]) == [0]
    assert missing([2, 0]) == []
    assert missing([], phase=PREFILL) == []


def test_section_3_2_partial_hidden_orders_by_merged_score():
    """Both tokens predict 0, one 1, one 2. Maxima .6, .5, .45 of 1, 2, 0; sums .85, .6,
    .5 of 0, 1, 2.
    """
    columns = {"pred1_raw": [[0.4, 0.6, 0.0], [0.45, 0.0, 0.5]]}
    for parameters, resident, expected in (
        ({}, set(), [1, 2, 0]),
        ({"merge": "sum"}, set(), [0, 1, 2]),
        ({"size": 2}, {(0, 1, 1)}, [2]),
    ):
        policy = started(PartialHidden(**parameters), 2, 3)
        view = View(2, 3, resident=resident, top_k=2)
        now = work(experts=[0], width=3)
        assert experts(named(policy, now, view, predicted=columns)) == expected
    # The queue is cleared when the true gate is known.
    assert PartialHidden.late == "drop"


def test_random_guesses_alike_whatever_is_present():
    """Its draws do not depend on residency, and over many layer steps every expert is
    drawn equally often.
    """
    empty, full = (started(RandomPrefetch(size=2), 2, 6, seed=7) for _ in range(2))
    counts = np.zeros(6)
    for _ in range(600):
        now = work(experts=[0], width=6)
        guess = experts(named(empty, now, View(2, 6)))
        counts[guess] += 1
        kept = experts(named(full, now, View(2, 6, resident={(0, 1, 4)})))
        assert kept == [e for e in guess if e != 4]
    assert counts.sum() == 1200
    assert np.abs(counts - 200).max() < 4 * np.sqrt(200)


def test_section_6_5_whole_layer_names_everything():
    policy = started(WholeLayer(), 2, 3)
    view = View(2, 3, resident={(0, 1, 1)})
    both = [*((0, e) for e in range(3)), *((1, e) for e in range(3))]
    assert named(policy, work(experts=[0], width=3), view) == both
    assert not named(policy, work(experts=[0], layer=1, width=3), view)


# -- oracles ---------------------------------------------------------------------------

_FUTURE = ListFuture(
    [
        LayerStep(0, 0, [1]),
        LayerStep(0, 1, [4, 2]),
        LayerStep(0, 2, [0, 5]),
        LayerStep(1, 0, [3]),
    ]
)


def test_oracles_know_the_coming_layers_of_this_step():
    view = View(3, 6, resident={(0, 1, 2)}, future=_FUTURE)
    next_layer = [(1, 2), (1, 4)]

    def foreseen(policy):
        assert policy.oracle
        return named(started(policy, 3, 6), work(experts=[1], width=6), view)

    assert foreseen(Clairvoyant()) == next_layer
    assert foreseen(Clairvoyant(depth=9)) == [*next_layer, (2, 0), (2, 5)]
    assert foreseen(PreGated()) == next_layer
    assert sorted(foreseen(NoisyOracle(accuracy=1.0))) == next_layer


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9, 1.0])
def test_noisy_oracle_is_as_accurate_as_stated(accuracy):
    """Within four standard errors over 3000 predictions of 4 of 32 experts; as many are
    named as are active.
    """
    rng = np.random.default_rng(1)
    active = [
        LayerStep(step, 1, rng.choice(32, 4, replace=False).tolist())
        for step in range(3000)
    ]
    policy = started(NoisyOracle(accuracy=accuracy), 2, 32)
    view = View(2, 32, future=ListFuture(active))
    right = guessed = 0
    for step, _, truth in active:
        now = work(experts=[0], step=step, width=32)
        guess = experts(named(policy, now, view))
        assert len(set(guess)) == 4
        right = right + len(set(guess) & set(truth))
        guessed = guessed + len(guess)
    error = np.sqrt(accuracy * (1 - accuracy) / guessed)
    assert abs(right / guessed - accuracy) <= 4 * error


# -- activation matrices ---------------------------------------------------------------


def known(*rows):
    """Matrices of 3 layers x 4 experts, given by the expert each layer used (with 10
    tokens).
    """
    matrices = np.zeros((len(rows), 3, 4))
    for n, row in enumerate(rows):
        matrices[n, range(3), row] = 10
    return matrices


def test_section_6_9_the_most_similar_sequence_predicts_the_coming_layers():
    """Two sequences: 0-1-2 and 3-2-1. With the prefix mask the first layer decides: 3
    is followed by 2, then 1.
    """
    for expert, resident, expected in (
        (3, set(), [(1, 2), (2, 1)]),
        (0, {(0, 1, 1)}, [(2, 2)]),
    ):
        policy = started(
            ActivationMatrix(mask="prefix"),
            3,
            4,
            activation_matrices=known([0, 1, 2], [3, 2, 1]),
        )
        now = work(experts=[expert], width=4)
        assert named(policy, now, View(3, 4, resident=resident)) == expected


def test_a_full_store_forgets_who_was_found_least_and_never_the_calibrated():
    """Three places, one of them calibrated (expert 0): sequences of experts 1 and 2 come
    in, and 1 is found once more than 2. So the next sequence takes the place of 2.
    """
    policy = started(
        ActivationMatrix(mask="prefix", capacity=3),
        3,
        4,
        activation_matrices=known([0, 1, 1]),
    )
    view = View(3, 4)

    def found(expert, batch):
        """Which layer-1 expert a sequence that begins with one is told of."""
        told, *_ = (
            named(policy, work(experts=[expert], layer=n, batch=batch, width=4), view)
            for n in range(3)
        )
        return experts(told[:1])

    assert found(1, 0) == [1]
    found(2, 1)
    assert found(1, 2) == [1]
    # 3 takes the place of 2: whoever begins with 2 is told of the oldest.
    found(3, 3)
    assert found(3, 4) == [3]
    assert found(0, 5) == [1]


def test_the_similar_sequence_is_that_of_the_definition():
    """The highest mean over the coming layers of the cosine between rows, recomputed
    from scratch; named are its most used experts there, nearer layers for more.
    """
    rng = np.random.default_rng(0)
    matrices = rng.integers(0, 5, (6, 4, 8)).astype(float)
    policy = started(
        ActivationMatrix(capacity=6, size=None), 4, 8, activation_matrices=matrices
    )
    current = np.zeros((4, 8))
    for step in range(8):
        for layer in range(4):
            active = np.sort(rng.choice(8, 2, replace=False))
            current[layer, active] += (1, 2)
            now = work(experts=active, tokens=[1, 2], layer=layer, step=step)
            keys = named(policy, now, View(4, 8))
            norms = np.linalg.norm(matrices, axis=2) * np.linalg.norm(current, axis=1)
            cosine = (matrices * current).sum(axis=2) / np.maximum(norms, 1e-30)
            coming = cosine[:, layer + 1 :].sum(axis=1)
            similar = matrices[int(coming.argmax())]
            value = {
                (j, e): similar[j, e] * (1 - (j - layer) / 5)
                for j in range(layer + 1, 4)
                for e in range(8)
                if similar[j, e]
            }
            best = sorted(value, key=lambda key: (-value[key], key))
            assert keys == best


def test_misshapen_matrices_are_named():
    with pytest.raises(
        PolicyError,
        match=r"'activation_matrices': expected shape \(N, 3, 4\), got \(1, 2, 4\)",
    ):
        started(ActivationMatrix(), 3, 4, activation_matrices=np.zeros((1, 2, 4)))


def test_the_searched_map_is_that_of_the_definition():
    """FineMoE, equations 5 to 8, from scratch: the map with the highest cosine to the
    layers so far, of which the likeliest experts up to 1 less the cosine are named, two
    at least. A full store gives the place of the map that the pass resembles most.
    """
    rng = np.random.default_rng(1)
    policy = started(FineMoE(distance=2, capacity=5), 4, 8, top_k=2)
    maps = np.zeros((0, 4, 8))
    sizes = set()
    for step in range(20):
        # Sharp gates resemble few maps, so that sometimes more than two are named.
        current = rng.dirichlet([0.2] * 8, 4)
        for layer in range(4):
            # Scores are gates' in any unit.
            scores = 3.0 * current[layer]
            now = work(experts=[0], layer=layer, step=step, scores=scores)
            likeliest = experts(named(policy, now, View(4, 8)))
            seen = current[: layer + 1].ravel()
            known = maps[:, : layer + 1].reshape(len(maps), seen.size)
            lengths = np.linalg.norm(known, axis=1) * np.linalg.norm(seen)
            cosine = known @ seen / lengths
            best = int(cosine.argmax()) if len(maps) else -1
            if layer < 2 and len(maps):
                likely = np.argsort(-maps[best, layer + 2], kind="stable")
                taken = np.cumsum(maps[best, layer + 2][likely])
                enough = 1 + int(np.searchsorted(taken, 1.0 - cosine[best]))
                assert likeliest == likely[: max(2, enough)].tolist()
                sizes.add(len(likeliest))
            else:
                assert not likeliest
        if step < 5:
            maps = np.concatenate((maps, current[None]))
        else:
            maps[best] = current
    assert len(sizes) > 1


def test_in_flight_experts_are_not_asked_for_again():
    table = np.ones((2, 3, 3))
    view = View(2, 3, in_flight={(0, 1, 0)})
    for refill, expected in ((False, [1]), (True, [1, 2])):
        policy = Statistical(size=2, refill=refill)
        started(policy, 2, 3, transitions=table)
        assert experts(named(policy, work(experts=[0], width=3), view)) == expected
