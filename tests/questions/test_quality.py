"""Altered routing does nothing where nothing is altered, and what brute force says
elsewhere.
"""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from support.families import SOME, VOCABULARY, Swapped
from support.handmade import registered
from torch.nn import functional

from moesim import cli
from moesim.base.errors import TraceError
from moesim.engine.planner import Planner
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies import cache_replay
from moesim.policies.base import PolicyError, RoutingPolicy
from moesim.policies.cache.lru import LRU
from moesim.policies.names import IN_FLIGHT, RESIDENT
from moesim.policies.systems import System
from moesim.questions import quality
from moesim.runs.config import MemoryOptions
from moesim.runs.memory import plan_memory
from moesim.runtime.models.expert_layout import UNUSED
from moesim.runtime.models.gates import find_blocks, read_gate
from moesim.runtime.models.local_model import LocalModel, load_model, model_shape
from moesim.runtime.models.offloaded import StoreExperts
from moesim.runtime.quality import Passages, PolicyUnderTest, measure
from moesim.traces.format.batch import RoutedStep
from moesim.traces.format.layer_steps import of_steps
from moesim.traces.format.schema import Phase

torch.set_num_threads(1)
PROFILE = load_profile("rtx3090-epyc7532")
PROMPT = 6
SCORED = 5


def filled(routing, experts):
    """Answer with these experts, [T, K]."""
    for n, expert in enumerate(experts.reshape(-1)):
        routing[n] = expert
    return experts.shape[1]


class Unmoved(RoutingPolicy):
    """Says it alters, and repeats the gate: in other words, with other memory, in a
    wider row.
    """

    def route(self, gate, view, routing):
        padding = ((0, 0), (0, 1))
        wide = np.pad(np.asarray(gate.experts), padding, constant_values=UNUSED)
        return filled(routing, wide)

    def weigh(self, gate, experts):
        return np.pad(np.asarray(gate.weights), ((0, 0), (0, 1)))


class Crossed(RoutingPolicy):
    """Every expert gives its place to its neighbour."""

    def route(self, gate, view, routing):
        return filled(routing, np.asarray(gate.experts) ^ 1)


class Undecided(RoutingPolicy):
    """Names experts and no weights."""

    def route(self, gate, view, routing):
        return filled(routing, np.asarray(gate.experts) ^ 1)

    def weigh(self, gate, experts):
        return None


class Curious(RoutingPolicy):
    """Wants the words themselves."""

    needs = ("token",)

    def route(self, gate, view, routing):
        return filled(routing, np.asarray(gate.experts))


@pytest.fixture(autouse=True, scope="module")
def policies_of_this_module():
    with registered(
        routing_unmoved=Unmoved,
        routing_crossed=Crossed,
        routing_undecided=Undecided,
        routing_curious=Curious,
    ):
        yield


@pytest.fixture(scope="module", params=SOME)
def swapped(request, tmp_path_factory):
    made = Swapped(request.param, tmp_path_factory.mktemp("quality"))
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def trial(
    local, system, ratio=0.25, *, own_input=False, cls=PolicyUnderTest, full=False
):
    shape = model_shape(local.model, local.name)
    plan = plan_memory(
        MemoryOptions(cache_ratio=ratio, staging=4), shape, PROFILE, system
    )
    counts = np.ones((shape.layers, shape.experts)) if full else None
    policies = system.build(gpus=1, host_cache=None)
    return cls(
        Planner(shape, Costs(PROFILE, shape), policies, plan, calibration=counts),
        own_input,
    )


def random_passages(count=2, scored=SCORED):
    draws = torch.Generator().manual_seed(1)
    return Passages(
        torch.randint(0, VOCABULARY, (count, PROMPT + scored + 1), generator=draws),
        PROMPT,
    )


def is_the_model_itself(scores):
    return (
        (scores.kl == 0).all()
        and scores.agrees.all()
        and (scores.nats == scores.reference_nats).all()
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_a_gate_that_keeps_its_word_is_the_model_itself(swapped, batch):
    """Not nearly: bit for bit, in every architecture, recorded or repeated."""
    local = LocalModel("random", swapped.plain)
    trials = [
        trial(local, System("on-demand", routing=name))
        for name in ("as-recorded", "unmoved")
    ]
    for scores in measure(local, random_passages(), trials, batch=batch):
        assert is_the_model_itself(scores)
        untouched = {"altered": 0, "stale": 0, "gate_mass_kept": 1}
        assert scores.shares.items() >= untouched.items()


def test_readers_are_the_library_reading_at_once_and_wrong_experts_what_brute_force_says(
    swapped,
):
    """Token by token with a KV cache, or the whole passage in one pass; the same swap
    inside `StoreExperts`, another way to the experts, gives the same loss.
    """

    class Neighbours(StoreExperts):
        def experts(self, layer, hidden, index, weights):
            return super().experts(layer, hidden, index ^ 1, weights)

    local = LocalModel("random", swapped.plain)
    passages = random_passages()
    (scores,) = measure(
        local, passages, [trial(local, System("on-demand", routing="crossed"))]
    )
    swapped.offloaded.handler = Neighbours(swapped.store)
    with torch.inference_mode():
        wrong, plain = (
            model(passages.tokens[:, :-1]).logits[:, PROMPT:].log_softmax(-1)
            for model in (swapped.offloaded.model, swapped.plain)
        )
    coming = passages.tokens[:, PROMPT + 1 :, None]
    for logits, nats in ((wrong, scores.nats), (plain, scores.reference_nats)):
        expected = -logits.gather(2, coming)[..., 0]
        assert nats == pytest.approx(expected.numpy(), abs=2e-4)
    kl = functional.kl_div(wrong, plain, log_target=True, reduction="none").sum(-1)
    assert scores.kl == pytest.approx(kl.numpy(), abs=2e-4)
    assert scores.kl.min() > 1e-6
    assert scores.shares["altered"] > 0.5


def nats_of(model, passages):
    """Let a model read passages as `measure` does: [N, S]."""
    cache = None
    logits = []
    prompt = passages.tokens[:, :PROMPT]
    with torch.inference_mode():
        for piece in (prompt, *passages.tokens[:, PROMPT:-1].split(1, dim=1)):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[:, -1])
    nats = functional.cross_entropy(
        torch.stack(logits[1:], -1), passages.tokens[:, PROMPT + 1 :], reduction="none"
    )
    return nats.numpy()


def test_deferred_experts_join_one_layer_later(tmp_path):
    """KTransformers' expert deferral by brute force: three layers, nothing resident, the
    lowest-scored of three experts deferred by the first two layers.
    """
    made = Swapped("qwen3_moe", tmp_path, num_hidden_layers=3, num_experts_per_tok=3)

    class Deferring(StoreExperts):
        def experts(self, layer, hidden, index, weights):
            if len(hidden) > 1:
                return super().experts(layer, hidden, index, weights)
            late = weights == weights.min()
            if layer == 2:
                late = torch.zeros_like(late)
            result = super().experts(layer, hidden, index, weights * ~late)
            if layer:
                result = result + self.left
            self.left = super().experts(layer, hidden, index, weights * late)
            return result

    local = LocalModel("random", made.plain)
    passages = random_passages(1, scored=8)
    policies = [
        trial(local, System(f"fixed-mapping:defer={defer}", "none"), full=True)
        for defer in (1, 0)
    ]
    deferred, at_once = measure(local, passages, policies)
    made.offloaded.handler = Deferring(made.store)
    nats = nats_of(made.offloaded.model, passages)
    made.store.close()
    assert deferred.nats == pytest.approx(nats, abs=2e-4)
    # One of three, in two of three layers.
    assert deferred.shares["stale"] == pytest.approx(2 / 9)
    assert deferred.kl.max() > 1e-6
    assert is_the_model_itself(at_once)


def test_experts_begun_a_layer_ahead_work_on_the_input_of_that_layer(tmp_path):
    """DAOP's pre-calculation by brute force: two layers, nothing resident, the gate
    itself keeps its word.
    """
    made = Swapped("qwen3_moe", tmp_path, num_hidden_layers=2, num_experts_per_tok=3)
    blocks = find_blocks(made.offloaded.model)

    class Early(StoreExperts):
        def experts(self, layer, hidden, index, weights):
            if layer == 0 or len(hidden) > 1:
                self.before = hidden
                return super().experts(layer, hidden, index, weights)
            foreseen = read_gate(blocks[1].gate(self.before), 8)[0].topk(3).indices
            early = (index[:, :, None] == foreseen[:, None, :]).any(-1)
            late = super().experts(layer, hidden, index, weights * ~early)
            return late + super().experts(layer, self.before, index, weights * early)

    local = LocalModel("random", made.plain)
    passages = random_passages(1, scored=8)
    daop = System("daop:first_layer=1", "none")
    scores, own = measure(
        local,
        passages,
        [trial(local, daop), trial(local, daop, own_input=True)],
        columns=("pred1_raw",),
    )
    made.offloaded.handler = Early(made.store)
    nats = nats_of(made.offloaded.model, passages)
    made.store.close()
    assert scores.nats == pytest.approx(nats, abs=2e-4)
    assert 0 < scores.shares["stale"] <= 0.5
    assert scores.kl.max() > 1e-4
    assert is_the_model_itself(own)
    assert own.shares["stale"] == 0


@pytest.mark.parametrize(("system", "full"), [
    (System("on-demand", routing="expert-cache-router:alpha=0"), False),
    (System("on-demand", "none", routing="expert-cache-router:alpha=0.9,phase=decode"),
     False),
    (System("on-demand", routing="adaptive-gating:budget=0"), False),
    (System("on-demand", routing="cache-prior:strength=0"), False),
    (System("on-demand", routing="expert-cache-router:alpha=0.9"), True),
    (System("on-demand", routing="cache-prior:strength=0.9"), True),
    (
        System(
            "daop:first_layer=1",
            routing="graceful-degradation:first_layer=1,choice=gate",
        ),
        True,
    ),
])  # fmt: skip
def test_no_band_nothing_resident_or_everything_resident_changes_nothing(
    tiny, system, full
):
    """Exactly: a policy that swaps absent experts for resident ones has neither reason
    nor choice.
    """
    passages = Passages.of_corpus(1, prompt=24, scored=12)
    one = trial(tiny, system, ratio=1.0 if full else 0.25, full=full)
    (scores,) = measure(
        tiny, passages, [one], columns=("scores", "weights", "pred1_raw")
    )
    assert is_the_model_itself(scores)
    assert scores.shares["altered"] == 0
    assert (
        scores.shares["hit_rate_active"] == 1
        if full
        else scores.shares["hit_rate_active"] < 1
    )


def test_half_a_cache_costs_answers_and_wins_hits(tiny):
    """All shares of one reading hang together."""
    passages = Passages.of_corpus(2, prompt=24, scored=12)
    systems = [
        System("on-demand"),
        System("on-demand", routing="expert-cache-router:alpha=0.5"),
    ]
    plain, swapping = measure(
        tiny, passages, [trial(tiny, system) for system in systems], columns=("scores",)
    )
    assert is_the_model_itself(plain)
    assert swapping.shares["hit_rate_active"] > plain.shares["hit_rate_active"]
    assert swapping.shares["altered"] > 0
    assert 0.5 < swapping.shares["gate_mass_kept"] < 1
    assert (
        swapping.shares["experts_used"]
        == plain.shares["experts_used"]
        == tiny.model.config.num_experts_per_tok
    )
    assert (swapping.kl >= -1e-12).all()
    assert swapping.kl.max() > 0
    assert (swapping.reference_nats == plain.reference_nats).all()


def test_without_time_one_passage_is_read_and_the_others_are_said():
    report = quality.quality(
        policy="on-demand",
        routing="expert-cache-router:alpha=0.3",
        tokens=12,
        prompt_tokens=8,
        scored_tokens=4,
        hw="rtx3090-epyc7532",
        minutes=0.0,
    )
    assert (report.config["passages"], report.config["left_out"]) == (1, 2)
    assert report.config["tokens"] == 4
    assert "1 passages scored, 2 left out" in quality.quality_answer(report).text()


def test_experts_that_are_left_out_are_not_counted(tiny):
    """AdapMoE with a threshold above every share: one expert serves each token, at
    every layer of every step.
    """
    one = trial(tiny, System("on-demand", routing="adaptive-gating:budget=10"))
    (scores,) = measure(
        tiny, Passages.of_corpus(1, prompt=16, scored=8), [one], columns=("weights",)
    )
    assert (scores.shares["experts_used"], scores.shares["altered"]) == (1, 1)
    assert 0.25 < scores.shares["gate_mass_kept"] < 1
    assert scores.kl.max() > 0


class Witness(PolicyUnderTest):
    """Keeps what the gates said, and looks at the books after every layer step."""

    __slots__ = ("seen",)

    def begin(self, phase, batch):
        if self._step < 0:
            self.seen = []
        super().begin(phase, batch)
        self.seen.append(RoutedStep(self._step, phase, batch, 0, 0, 0, []))

    def layer(self, routed):
        work = super().layer(routed)
        self.seen[-1].layers.append(routed)
        memory = self.planner.gpu[0]
        assert IN_FLIGHT not in list(memory.state)
        assert not any(memory.holds)
        return work


def test_every_copy_lands_before_the_next_layer_and_hits_are_those_of_the_cache_alone(
    tiny,
):
    """LRU under on-demand, prefetching or not; without prefetch a cache alone, on the
    same gates, hits as often.
    """

    class Counting(LRU):
        def accessed(self, work):
            super().accessed(work)
            if work.phase == Phase.DECODE:
                states.extend(work.arrays().state.tolist())

    passages = Passages.of_corpus(2, prompt=16, scored=8)
    bare = trial(tiny, System("on-demand"), cls=Witness)
    ahead = trial(tiny, System("on-demand", prefetch="next-gate"), cls=Witness)
    alone, prefetching = measure(tiny, passages, [bare, ahead], columns=("pred1_raw",))
    states = []
    shape = bare.planner.shape
    size = bare.planner.sizes.gpu
    cache_replay.replay(Counting(), "lru", shape, size, of_steps(bare.seen))
    assert alone.shares["hit_rate_active"] == states.count(RESIDENT) / len(states)
    assert prefetching.shares["hit_rate_active"] > alone.shares["hit_rate_active"]
    assert is_the_model_itself(prefetching)


def test_answers_do_not_depend_on_the_machine():
    """A link ten times as slow changes nothing where the assignment does not weigh
    it.
    """
    options = {
        "cache": "lru",
        "routing": "expert-cache-router:alpha=0.4",
        "tokens": 8,
        "scored_tokens": 8,
    }
    one, other = (
        quality.quality("tiny", "on-demand", hw=hw, prompt_tokens=12, **options).frame
        for hw in ("rtx3090-epyc7532", "two-core-host")
    )
    pd.testing.assert_frame_equal(one, other, check_exact=True)


@pytest.mark.parametrize(("given", "words"), [
    ({"policy": "on-demand+belady"}, "cache policy 'belady' is an oracle"),
    ({"policy": "on-demand", "routing": "curious"},
     "policy needs 'token': a model's gates show weights, scores"),
    ({"policy": "on-demand", "routing": "undecided"},
     "expected weights beside the experts"),
    ({"policy": "on-demand", "routing": "as-recorded:alpha=0.1"},
     "unknown parameter 'alpha'"),
    ({"policy": "on-demand+lru+none+none"}, "expected at most assignment"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_by_name(given, words):
    with pytest.raises((PolicyError, TypeError), match=words):
        quality.quality(
            "tiny", tokens=4, scored_tokens=4, prompt_tokens=4, hw=PROFILE, **given
        )


def test_text_is_cut_into_consecutive_passages(tmp_path):
    """Three of six tokens from nineteen; a text shorter than one passage is refused."""
    passages = Passages.cut(range(19), prompt=3, scored=2, most=9)
    assert passages.tokens.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17],
    ]
    assert passages.scored == 2
    assert len(Passages.cut(range(19), prompt=3, scored=2, most=2).tokens) == 2
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(TraceError, match=r"expected at least 129 tokens .* found 3"):
        quality.quality("tiny", "on-demand", text=tmp_path / "short.txt", hw=PROFILE)


def test_the_command_sweeps_prints_and_writes(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(
        "def add(one, other):\n    return one + other\n" * 9
    )
    routing = "expert-cache-router:phase=decode,alpha="
    line = (
        f"quality --policy on-demand --routing {routing}0,{routing}0.4"
        f" --text {tmp_path}/text.txt --cache-ratio 0.25,0.5 --tokens 8"
        " --prompt-tokens 16 --scored-tokens 4 --hw rtx3090-epyc7532"
        f" --png {tmp_path}/q.png --html {tmp_path}/q.html"
    )
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert not end.value.code
    printed = capsys.readouterr().out
    rows = {
        tuple(text.split()[:2]) for text in printed.splitlines() if text[:6] == "expert"
    }
    assert rows >= {
        (routing + alpha, share) for alpha in ("0", "0.4") for share in ("25.0", "50.0")
    }
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    assert f"moesim {line}" in (tmp_path / "q.html").read_text()
    with pytest.raises(SystemExit):
        cli.main(f"{line} --json".split())
    scores = json.loads(capsys.readouterr().out)
    settings = scores["settings"]
    asked = [
        (routing + alpha, share) for alpha in ("0", "0.4") for share in (0.25, 0.5)
    ]
    assert [(row["routing"], row["cache_ratio"]) for row in settings] == asked
    assert {row["kl"] for row in settings[:2]} == {0.0}
    assert scores["config"]["tokens"] == 8
    assert len({row["reference_nats"] for row in scores["settings"]}) == 1
    for row in scores["settings"]:
        assert row["perplexity"] == pytest.approx(
            np.exp(row["reference_nats"] + row["delta_nats"])
        )


def test_caches_have_the_same_names_in_charts_and_in_the_table():
    row = dict.fromkeys(("kl", "agreement", "hit_rate_active"), 0.5)
    config = {"model": "tiny", "tokens": 8, "assignment": "on-demand", "cache": "lru"}
    rows = [row | {"routing": "a:b=1", "cache_ratio": ratio} for ratio in (0.5, 0.05)]
    report = quality.Quality(pd.DataFrame(rows), config)
    assert quality.quality_drawn(report).names() == ["5.0 %", "50.0 %"]
