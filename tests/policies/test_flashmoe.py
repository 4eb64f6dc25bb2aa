"""FlashMoE's learned cache: its features, labels and network by hand, its training by
what it can learn, its time.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cache_driver import context, untrained, victims, work
from support.handmade import HandCosts, plan_of, routed, run, shape, spans, steps
from support.small_trace import write_trace
from typer.testing import CliRunner

from moesim import cli
from moesim.base.errors import TraceError
from moesim.policies.base import PolicyError
from moesim.policies.cache._learned_network import (
    FlashMoERequests,
    History,
    LRURequests,
    Network,
    sizes,
)
from moesim.policies.cache.flashmoe import FlashMoE
from moesim.policies.cache_replay import replay as replay_blocks
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import System
from moesim.questions import learned_cache as learned
from moesim.questions.compare import compare
from moesim.questions.learned_cache import check_held_out, split
from moesim.runs import replay as api
from moesim.runs.replay import replay_cache
from moesim.runs.setup import load_artefacts
from moesim.runtime.train_cache import distance_labels, forward, horizon_for, train
from moesim.traces.format.batch import compose
from moesim.traces.format.layer_steps import of_steps
from moesim.traces.format.reader import open_trace
from moesim.traces.importers.readers.arrays import load_named

NEVER = np.inf


def passes(*experts: int):
    """One layer, one expert per forward pass."""
    return steps(*[[routed(0, expert)] for expert in experts])


# -- features and labels --------------------------------------------------------------


def test_section_5_3_features():
    """4 experts, steps {3}, {2}, {3, 0}: recencies, frequencies and their scaled forms
    as printed in §5.3.
    """
    history = History(1, 4)
    ages = []
    uses = []
    for active in ([3], [2], [0, 3]):
        history.note(0, np.array(active))
        ages.append(history.age[0].tolist())
        uses.append(history.uses[0].tolist())
    assert ages == [[NEVER, NEVER, NEVER, 1], [NEVER, NEVER, 1, 2], [1, NEVER, 2, 1]]
    assert uses == [[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 1, 2]]
    assert history.features(0).tolist() == [1, 0, 0.5, 1, 0.5, 0, 0.5, 1]


def test_section_5_3_a_layer_that_nobody_has_seen_has_no_features():
    """CECAR's runtime begins with recency 0, which looks freshly used; here never is
    never.
    """
    assert History(2, 3).features(1).tolist() == [0.0] * 6


def test_section_5_3_layers_age_apart():
    history = History(2, 2)
    history.note(0, np.array([0]))
    history.note(1, np.array([1]))
    history.note(1, np.array([0]))
    assert history.age.tolist() == [[1, NEVER], [1, 2]]


@pytest.mark.parametrize(
    ("experts", "steps", "horizon"),
    [(64, 1000, 48), (128, 1000, 98), (32, 1000, 24), (256, 1000, 192), (256, 225, 45)],
)
def test_section_5_4_horizons(experts, steps, horizon):
    """CECAR's two, ours between and beyond, and never more than the fifth of the steps
    that validates.
    """
    assert horizon_for(experts, steps) == horizon


def test_section_5_4_distances_are_strictly_later_and_bounded_by_the_end_of_the_trace():
    """K = 5: distances (1, 3, never) become (0, 0.5, 1). 0 is used in steps 0 and 3, 1 in step 1 only: after its last use, the end says
    "at least so far".
    """
    active = np.array([[1, 0], [0, 1], [0, 0], [1, 0]], bool)
    target, at_least = distance_labels(active, 5)
    assert (target * 4 + 1).tolist() == [[3, 1], [2, 3], [1, 2], [1, 1]]
    assert distance_labels(active, 2)[0].max() == 1
    assert at_least.tolist() == [
        [False, False],
        [False, True],
        [False, True],
        [True, True],
    ]


# -- the network -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "experts", "kib"), [(64, 128, 113.0), (128, 128, 257.5), (64, 64, 64.75)]
)
def test_section_5_4_sizes(hidden, experts, kib):
    """113 KiB, the paper's figure, needs h = 64: 256·64 + 64 + 64·64 + 64 + 64·128 +
    128 = 28,928 numbers.
    """
    network = Network.of(untrained(1, experts, hidden), "here")
    assert network.bytes_per_layer / 1024 == kib
    if (hidden, experts) == (64, 128):
        assert network.bytes_per_layer == 28_928 * 4


def test_numpy_evaluates_what_torch_trained():
    model = shape(layers=3, experts=8)
    drawn = np.random.default_rng(0).integers(0, 8, (60, 3))
    trained = train(
        steps(*[[routed(layer, row[layer]) for layer in range(3)] for row in drawn]),
        model,
        epochs=3,
    )
    features = np.random.default_rng(1).random((3, 5, 16), np.float32)
    expected = forward(
        [torch.from_numpy(array) for array in trained.network],
        torch.from_numpy(features),
    ).numpy()
    for layer in range(3):
        for n in range(5):
            distances = trained.network.evaluate(layer, features[layer, n])
            assert distances == pytest.approx(expected[layer, n], abs=1e-6)


def test_equal_seeds_train_equal_bytes(tmp_path):
    contents = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        trained = train(passes(*[0, 1, 2, 3] * 10), shape(), epochs=2, seed=seed)
        contents.append(b"".join(array.tobytes() for array in trained.network))
        trained.save(tmp_path / f"{name}.safetensors")
    assert contents[0] == contents[1] != contents[2]
    assert (
        load_named(tmp_path / "a.safetensors")["w1"].tobytes()
        == contents[0][: 128 * 8 * 4]
    )
    assert not list(tmp_path.glob("*.part"))


def test_too_short_a_trace_teaches_nothing():
    with pytest.raises(
        TraceError, match="expected at least 20 forward passes, found 8"
    ):
        train(passes(*[0, 1] * 4), shape())


# -- the policy ------------------------------------------------------------------------


def ranking(scores) -> dict[str, np.ndarray]:
    """A network that answers `scores` [L, N] whatever it is asked."""
    scores = np.array(scores, np.float32)
    arrays = {
        name: np.zeros(size, np.float32)
        for name, size in sizes(*scores.shape, 2).items()
    }
    return arrays | {"b3": scores}


def test_the_highest_output_among_the_candidates_leaves_ties_to_the_lower_id():
    policy = resolved(ranking([[0.9, 0.2, 0.7, 0.7]]), experts=4)
    assert victims(policy, [1, 9], [1, 2, 3]) == [2, 3]


def test_scores_follow_the_history():
    """A network that answers ``1 / age`` evicts the most recently used; the score is
    renewed after each access.
    """
    arrays = {name: np.zeros(size, np.float32) for name, size in sizes(1, 2, 2).items()}
    arrays["w1"][0, :, :2] = arrays["w2"][0] = arrays["w3"][0] = np.eye(2)
    policy = resolved(arrays, experts=2)
    for used, leaves in ((0, 0), (1, 1), (0, 0)):
        policy.accessed(work(experts=[used], width=2))
        assert victims(policy, [5], [0, 1]) == [leaves]


def resolved(arrays, *, experts=8, layers=1):
    from dataclasses import replace

    policy = FlashMoE()
    policy.start(
        replace(
            context([], 2, layers=layers, experts=experts), extras={"flashmoe": arrays}
        )
    )
    return policy


def test_without_a_network_it_says_how_to_make_one():
    with pytest.raises(
        PolicyError,
        match=r"flashmoe.*found none.*train-cache TRACE --out DIR.*--artefacts DIR",
    ):
        plan_of(shape(), System("on-demand", "flashmoe"), slots=2)


@pytest.mark.parametrize(("layers", "experts"), [(2, 4), (1, 5)])
def test_a_network_of_another_shape_is_refused_in_one_line(layers, experts):
    with pytest.raises(PolicyError) as refusal:
        plan_of(
            shape(),
            System("on-demand", "flashmoe"),
            slots=2,
            extras={"flashmoe": untrained(layers, experts)},
        )
    text = str(refusal.value)
    assert "\n" not in text
    assert (
        f"expected 1 layers x 4 experts, found a network of {layers} x {experts}; train"
        " one on a trace" in text
    )


def test_damaged_networks_are_refused_by_array():
    arrays = untrained(1, 4)
    with pytest.raises(
        PolicyError, match=r"w2: expected shape \(1, 4, 4\), found \(1, 4, 3\)"
    ):
        resolved(arrays | {"w2": arrays["w2"][:, :, :3]}, experts=4)
    del arrays["b3"]
    with pytest.raises(PolicyError, match="lacks 'b3'"):
        resolved(arrays, experts=4)


# -- time ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scoring_s", "copy_s", "exposed_s"),
    [(3.0, 4.0, 0.0), (10.0, 4.0, 6.0), (4.0, 4.0, 0.0)],
)
def test_section_5_4_scoring_hides_behind_the_load_and_only_the_rest_is_charged(
    scoring_s, copy_s, exposed_s
):
    """Two misses in one step: one evaluation, beside the first load; the third step
    hits and pays nothing.
    """
    system = System("on-demand", f"flashmoe:scoring_s={scoring_s}")
    planner = plan_of(
        shape(top_k=2),
        system,
        HandCosts(copy=copy_s, plan=0.5),
        slots=2,
        extras={"flashmoe": untrained(1, 4)},
    )
    _, timeline = run(
        planner, steps([routed(0, 0, 1)], [routed(0, 2, 3)], [routed(0, 2, 3)])
    )
    assert [end - start for *_, start, end in spans(timeline, "plan")] == [
        0.5 + exposed_s,
        0.5 + exposed_s,
        0.5,
    ]


def test_section_5_4_a_read_from_the_ssd_hides_the_scoring_too():
    """Read 8 s, then copy 4 s: of 15 s of scoring, 3 s show; a later copy from host
    memory hides only 4.
    """
    system = System("on-demand", "flashmoe:scoring_s=15.0")
    planner = plan_of(
        shape(), system, slots=1, host_slots=2, extras={"flashmoe": untrained(1, 4)}
    )
    _, timeline = run(planner, passes(0, 1, 0))
    assert [end - start for *_, start, end in spans(timeline, "plan")] == [
        3.0,
        3.0,
        11.0,
    ]


# -- training and judging --------------------------------------------------------------


def test_learned_on_the_shipped_calibration_trace_it_beats_lru_and_lfru_on_the_evaluation_trace():
    """Other texts, same model: 42 % to 39 % and 40 % at a quarter of the experts;
    Belady, who must admit, has 54 %.
    """
    data = Path(api.__file__).parents[2] / "traces" / "data"
    calibration, evaluation = (
        open_trace(data / f"tiny_{part}.parquet")
        for part in ("calibration", "evaluation")
    )
    trained = train(list(compose(calibration)), calibration.shape, hidden=64, epochs=15)
    policies = ("flashmoe", "lru", "lfru", learned.BOUND)
    artefacts = {"flashmoe": trained.network._asdict()}
    rates = learned.evaluate(
        policies, list(compose(evaluation)), evaluation.shape, 8, artefacts
    )
    assert rates["lru"] < rates["lfru"] < rates["flashmoe"] - 0.01
    assert rates["flashmoe"] < rates[learned.BOUND]


@pytest.mark.parametrize(
    ("sequences", "cut"),
    [([(2, 97)], 74), ([(1, 19)] * 5, 80), ([(1, 69), (1, 8), (1, 20)], 79)],
)
def test_training_and_held_out_part_never_mix(tmp_path, tiny_shape, sequences, cut):
    """A cut at three quarters, or at the beginning of a sequence nearby; together the
    parts are the trace, once.
    """
    trace = open_trace(write_trace(tmp_path / "t.parquet", tiny_shape, sequences))
    training, judging = split(trace)
    assert len(training) == cut
    together = [
        step.layers[0].routing.tolist() for part in (training, judging) for step in part
    ]
    assert together == [step.layers[0].routing.tolist() for step in compose(trace)]
    assert [step.step for step in judging] == list(range(len(judging)))


def test_a_trace_cannot_be_held_out_from_itself(tmp_path, make_trace):
    """Nor can a copy under another name, nor a longer trace that begins with it."""
    lengths = ((4, 6), (3, 5))
    training = open_trace(make_trace(sequences=lengths))
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(training.path.read_bytes())
    longer = make_trace("longer.parquet", sequences=(*lengths, (2, 9)))
    for held_out, shared in (
        (training, "2 of 2"),
        (copy, "2 of 2"),
        (longer, "2 of 3"),
    ):
        judged = held_out if held_out is training else open_trace(held_out)
        with pytest.raises(TraceError, match=f"found {shared} that are"):
            check_held_out(training, judged)
    other = open_trace(make_trace("other.parquet", sequences=lengths, seed=1))
    check_held_out(training, other)


def test_what_is_held_out_has_no_part_in_the_network(tmp_path, tiny_shape):
    """Other routing behind the cut gives the same weights."""
    model = shape(experts=6)
    trained = []
    for end in (0, 5):
        accesses = [0, 1, 2, 3] * 15 + [end] * 20
        whole = passes(*accesses)
        trained.append(train(whole[:60], model, epochs=2).network)
    assert all(np.array_equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """`moesim train-cache` on a small trace: (folder of the trace, folder of the
    result, standard output).
    """
    from moesim.traces.format.schema import ModelShape

    folder = tmp_path_factory.mktemp("learned")
    model = ModelShape("small", 3, 8, 2, 64, 32, (1 << 20,) * 3, 1 << 20)
    write_trace(folder / "t.parquet", model, [(4, 40)] * 4)
    line = f"train-cache {folder}/t.parquet --out {folder}/out"
    done = CliRunner().invoke(cli.app, f"{line} --hidden 16 --epochs 4".split())
    assert done.exit_code == 0, done.output
    return folder, folder / "out", done.stdout


def test_the_command_writes_network_and_report(command):
    _, out, printed = command
    assert sorted(path.name for path in out.iterdir()) == [
        "flashmoe.safetensors",
        "report.json",
        "report.md",
    ]
    report = json.loads((out / "report.json").read_text())
    assert {row["slots"] for row in report["rows"]} == {4}
    rates = {row["policy"]: row["hit_rate"] for row in report["rows"]}
    alone = {"flashmoe", "lru", "lfu", "lfru", "arc", "lecar", learned.BOUND}
    by_request = {f"{name}{learned.BY_REQUEST}" for name in ("flashmoe", "lru")}
    assert set(rates) == alone | by_request
    assert all(rates[name] <= rates[learned.BOUND] for name in alone)
    assert report["held_out_steps"] == [123, 164]
    text = (out / "report.md").read_text()
    for said in (text, printed):
        assert said.count("points of hit rate") == 1


def test_the_trained_network_runs_in_a_replay_and_alone(command):
    folder, out, _ = command
    system = {"cache": "flashmoe", "artefacts": out}
    timed = api.replay(
        folder / "t.parquet", "on-demand", **system, hw="rtx3090-epyc7532"
    )
    alone = replay_cache(folder / "t.parquet", **system)
    assert timed.metrics["hits"] == alone["hits"] > 0
    assert timed.config["artefacts"] == str(out)
    table, _ = compare(
        folder / "t.parquet", ["on-demand+flashmoe", "on-demand+lru"], artefacts=out
    )
    assert len(table) == 2


def test_folders_without_artefacts_are_refused(tmp_path):
    assert load_artefacts(None) == {}
    with pytest.raises(PolicyError, match="no such folder"):
        load_artefacts(tmp_path / "nowhere")
    with pytest.raises(PolicyError, match="found none; is it the right folder"):
        load_artefacts(tmp_path)
    np.save(tmp_path / "transitions.npy", np.ones((2, 3)))
    assert load_artefacts(tmp_path)["transitions"].shape == (2, 3)


# -- one request at a time --------------------------------------------------------------


def constant_network(*outputs: float) -> Network:
    """A network of one layer that says the same of its experts whatever they did."""
    arrays = {
        name: np.zeros(size, np.float32)
        for name, size in sizes(1, len(outputs), 2).items()
    }
    arrays["b3"] = np.array([outputs], np.float32)
    return Network.of(arrays, "test")


def served(cache, *layer_steps: list[int]) -> list[int]:
    """Hits of each layer step."""
    return [cache.serve(0, np.array(experts)) for experts in layer_steps]


def test_the_released_code_may_evict_what_the_same_step_needs():
    """Ranking 0, 1, 3, 2; two slots hold 1 and 3. The miss of 0 evicts 1, whose own
    miss evicts 3. Held, 1 would be a hit.
    """
    network = constant_network(0.9, 0.8, 0.1, 0.2)
    by_request = FlashMoERequests(network, 2)
    assert served(by_request, [1], [3], [0, 1], [0, 1]) == [0, 0, 0, 2]
    assert served(LRURequests(1, 2), [1], [3], [0, 1], [0, 1]) == [0, 0, 0, 2]
    layer_steps = steps(*[[routed(0, *used)] for used in ([1], [3], [0, 1], [0, 1])])
    size = CacheSize.of((100,), 4, slots_per_layer=2)
    extras = {"flashmoe": network._asdict()}
    blocks = of_steps(layer_steps)
    held = replay_blocks(FlashMoE(), "flashmoe", shape(), size, blocks, extras=extras)
    assert held.hits == 1 + 2


def test_the_released_ranking_is_walked_through_once_per_step():
    """One slot holds 2, the last of the ranking. The miss of 0 uses the ranking up, so
    the miss of 1 evicts the oldest.
    """
    by_request = FlashMoERequests(constant_network(0.9, 0.8, 0.1, 0.2), 1)
    assert served(by_request, [2], [0, 1], [1], [0]) == [0, 0, 1, 0]
