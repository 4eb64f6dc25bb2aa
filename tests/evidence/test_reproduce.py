"""Published figures beside ours: the quotes are true, the functions compute what they
say, everything resolves.
"""

import json
import math

import numpy as np
import pytest
import yaml
from conftest import SHARED
from support.handmade import hand_trace, routed, shape, steps
from support.small_trace import write_trace
from typer.testing import CliRunner

from moesim import cli
from moesim.engine.observers import observed_policy
from moesim.evidence.reproduction import routing as reproduce
from moesim.evidence.reproduction import routing_figures as figures
from moesim.evidence.reproduction.questions import data
from moesim.evidence.reproduction.routing import EXPERIMENTS
from moesim.evidence.reproduction.routing_figures import (
    CALLS,
    Excerpt,
    LacksError,
    RivalRecorder,
)
from moesim.policies import cache_replay
from moesim.policies.base import PolicyError
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.questions.learned_cache import BOUND
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import of_steps

REFERENCE = SHARED / "reference" / "published.yaml"
SHIPPED = reproduce.traces_at_hand()[0]
PASSES = 28


# What is quoted.


@pytest.fixture(scope="module")
def whole():
    """The records of the reference."""
    if not REFERENCE.is_file():
        pytest.skip(
            "other people's figures, no part of the project:"
            " ../shared/reference/published.yaml is not here"
        )
    return yaml.load(
        REFERENCE.read_text(encoding="utf-8"),
        getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )["records"]


def test_every_quoted_record_stands_in_the_reference(whole):
    quoted = data("published.yaml")["records"]
    assert quoted
    assert all(record in whole for record in quoted)


def test_no_record_was_left_behind(whole):
    assert len(reproduce.records()) == len(whole)


def test_figures_are_quoted_under_their_setting():
    hits = EXPERIMENTS["hybrimoe-hit-rate"].published
    assert hits["HybriMoE: Mixtral"]["LRU, 25 % cached"] == 30.2
    assert hits["HybriMoE: DeepSeek"]["MRS, 25 % cached"] == 52.7
    assert hits["DALI: Mixtral-8x7B"] == {"HybriMoE whole, 25 % cached": 25.3}
    table = EXPERIMENTS["dali-prefetch-workload"].published
    assert table["Mixtral-8x7B"]["HybriMoE, top 2, batch 64"] == 56.4
    assert len(table["DeepSeek-V2-Lite"]) == 16


# Everything resolves.


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_on_the_shipped_trace_or_says_what_it_lacks(name):
    found = reproduce.reproduce(name, [SHIPPED], steps=PASSES)
    (table,) = found.measured.values()
    assert found.models == {SHIPPED.stem: "tiny"}
    assert table
    for row, figure in table.items():
        if isinstance(figure, str):
            assert figure.startswith("lacks ")
            assert "\n" not in figure
        else:
            assert math.isfinite(figure)
            # More than twice as many hits is possible.
            assert -100 <= figure <= (200 if "change" in row else 100)
    assert any(isinstance(figure, float) for figure in table.values())
    assert json.loads(json.dumps(found.to_json()))["measured"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_trace_of_bare_routing_is_enough_or_its_lack_is_named(
    name, tmp_path, tiny_shape
):
    trace = write_trace(tmp_path / "bare.parquet", tiny_shape, ((0, 12),))
    (table,) = reproduce.reproduce(name, [trace], steps=PASSES).measured.values()
    assert table
    assert all(
        isinstance(figure, float) or figure.startswith("lacks ")
        for figure in table.values()
    )


def test_the_largest_batch_stands_in_where_published_ones_lack_sequences(
    tmp_path, tiny_shape
):
    """Three sequences: batches of 8 and more are lacking, one of 3 has a row."""
    trace = write_trace(tmp_path / "few.parquet", tiny_shape, ((0, 12),) * 3)
    name = "dali-prefetch-workload"
    (table,) = reproduce.reproduce(name, [trace], steps=PASSES).measured.values()
    assert table["EdgeMoE, top 1, batch 8"].startswith("lacks sequences: batches of 8")
    assert isinstance(table["EdgeMoE, top 1, batch 3"], float)
    assert "EdgeMoE, top 1, batch 3" not in EXPERIMENTS[name].published


def test_a_wrong_name_is_answered_with_the_right_one():
    with pytest.raises(PolicyError, match=r"did you mean 'hybrimoe-hit-rate'\?"):
        reproduce.reproduce("hybrimoe-hitrate")


def test_a_foreign_trace_at_hand_is_imported_on_the_way(shared_traces):
    found = reproduce.reproduce(
        "flashmoe-prefill", [shared_traces / "olmoe_1b_7b_decode299.parquet"]
    )
    assert found.models == {"olmoe_1b_7b_decode299": "olmoe-1b-7b"}
    assert 0 < found.measured["olmoe_1b_7b_decode299"]["32 tokens"] < 100


# What the functions compute.


def test_predictions_that_are_right_are_right_and_shifted_ones_are_not(tmp_path):
    """Layer 1 uses the expert after layer 0's. One column says so, the other says the
    one before.
    """
    rows = [[[t % 4], [(t + 1) % 4]] for t in range(8)]
    eye = np.eye(4)
    right = [[eye[(t + 1) % 4], eye[0]] for t in range(8)]
    wrong = [[eye[(t - 1) % 4], eye[0]] for t in range(8)]
    trace = hand_trace(
        tmp_path / "p.parquet", rows, experts=4, pred1_raw=right, pred1_res=wrong
    )
    load = Excerpt(trace)
    shares = dict.fromkeys(("chosen", "best", "active"))
    assert figures.foreseen(load, "HybriMoE") == dict.fromkeys(shares, 100.0)
    assert figures.foreseen(load, "DALI") == dict.fromkeys(shares, 0.0)
    assert figures.accuracy(load, "HybriMoE", 1)["1"] == 100.0
    assert figures.accuracy(load, "DALI", 1)["1"] == 0.0


def test_the_table_learns_who_follows_whom_in_the_first_half(tmp_path):
    """Expert 0 is always followed by 2, and 1 by 3; by the second half the table has
    seen both.
    """
    rows = [[[t % 2], [2 + t % 2]] for t in range(8)]
    load = Excerpt(hand_trace(tmp_path / "t.parquet", rows, experts=4))
    assert figures.accuracy(load, "EdgeMoE", 1)["1"] == 100.0


def test_section_2_5_similarity_of_prefill_and_decode(tmp_path):
    """Layer 0: shares (1/2, 1/4, 1/4) and (1/2, 1/2, 0), cosine .866025 (DAOP,
    equation 1).

    Layer 1 is alike in both: cosine 1.
    """
    prefill = [0, 0, 1, 2]
    decode = [0, 1, 0, 1]
    rows = [[[e], [n % 2]] for n, e in enumerate(prefill)] + [
        [[e], [n % 2]] for n, e in enumerate(decode)
    ]
    trace = hand_trace(tmp_path / "s.parquet", rows, experts=3, prompt=4)
    similarity = figures.similarity(Excerpt(trace))
    assert similarity == pytest.approx(100 * (0.866025 + 1) / 2, abs=1e-3)


def test_experts_touched_by_the_first_tokens(tmp_path):
    """32 tokens go round 4 of 8 experts in layer 0 and stay with one in layer 1: (4/8 +
    1/8) / 2.
    """
    rows = [[[t % 4], [5]] for t in range(40)]
    load = Excerpt(hand_trace(tmp_path / "f.parquet", rows, experts=8))
    assert figures.touched(load, 32) == pytest.approx(100 * (4 / 8 + 1 / 8) / 2)
    with pytest.raises(LacksError, match="lacks sequences of 64 tokens"):
        figures.touched(load, 64)


def test_section_5_5_evictions_and_their_re_use():
    """The step-atomic example of the reference, section 5.5: C = 3,
    {0,1}{2,3}{0,2}{1,4}{0,2}{3,4}.

    Hits, and how many victims are used again; a rival that is asked in the same cache
    and agrees is never worse.
    """
    model = shape(experts=5, top_k=2)
    chosen = ((0, 1), (2, 3), (0, 2), (1, 4), (0, 2), (3, 4))
    forward = steps(*[[routed(0, *pair)] for pair in chosen])
    future = RecordedFuture(forward)
    size = CacheSize.of(model.expert_bytes, model.experts, slots_per_layer=3)
    for spec, hits, evictions, again in (("lru", 3, 6, 4), (BOUND, 4, 5, 3)):
        policy = resolve(spec, "cache")
        watched = RivalRecorder(policy, resolve("lru", "cache"), future, model.experts)
        policy = observed_policy(policy, watched, CALLS)
        blocks = of_steps(forward)
        counts = cache_replay.replay(policy, spec, model, size, blocks, future=future)
        assert counts.hits == hits
        assert (watched.evictions, watched.soon) == (evictions, again)
        # LRU never differs from LRU, and nobody names a better victim than Belady.
        assert watched.better == watched.decided
        assert (watched.decided > 0) is (spec == BOUND)


# The command.


@pytest.fixture
def moesim():
    return lambda *words: CliRunner().invoke(cli.app, ["reproduce", *map(str, words)])


def test_the_list_names_every_experiment_and_its_needs(moesim):
    lines = moesim().stdout.splitlines()
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == list(EXPERIMENTS)
    assert " ".join(lines).count("needs ") == len(EXPERIMENTS)
    assert [entry["name"] for entry in json.loads(moesim("--json").stdout)] == list(
        EXPERIMENTS
    )


def test_a_reproduction_names_models_traces_and_caveats(moesim):
    done = moesim("hybrimoe-hit-rate", "--trace", SHIPPED, "--steps", PASSES)
    assert done.exit_code == 0, done.output
    for words in (
        "HybriMoE: Mixtral",
        "30.2",
        "ours: tiny",
        SHIPPED.stem,
        "note: ",
        f"{PASSES} forward passes",
    ):
        assert words in done.stdout


def test_what_a_trace_lacks_is_said_once_below_the_table(moesim, tmp_path, tiny_shape):
    trace = write_trace(tmp_path / "bare.parquet", tiny_shape, ((0, 6),))
    printed = moesim("daop-next-layer", "--trace", trace).stdout
    assert printed.count("[1] lacks column pred1_raw") == 1
    assert printed.count("note: ") == len(EXPERIMENTS["daop-next-layer"].remarks)
    assert "84.11" in printed
