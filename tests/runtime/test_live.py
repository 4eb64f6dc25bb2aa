"""A live model under any policy answers like the library's own: prefill and decode, any
cache, any mix of lanes.
"""

import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_accelerator import FakeAccelerator
from support.families import family, make_checkpoint
from support.handmade import registered
from support.real_machine import LAUNCHED, Case, combinations, host_profile, system_of

from moesim.base.errors import TraceError
from moesim.engine.observers import repeat
from moesim.policies.base import PolicyError, RoutingPolicy
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runtime.executor.device import StreamDevice
from moesim.runtime.executor.live import TOLERANCES, encode, verify
from moesim.runtime.executor.live_routing import load_routing, save_routing
from moesim.runtime.models import local_model as tiny
from moesim.runtime.models.local_model import LocalModel, generate, load_tokenizer
from moesim.runtime.record.calibration import Residual
from moesim.runtime.record.record import GateRecorder
from moesim.traces.format.schema import Phase
from moesim.traces.timeline.metrics import summarise

# Several helpers of one library on few cores spin more than they work.
torch.set_num_threads(1)
ALL = combinations(oracles=False)


ARCHITECTURES = ("mixtral", "qwen2_moe", "deepseek_v2", "gpt_oss")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    made = Case.make(
        make_checkpoint(request.param, folder / "m"), folder / "s", name=request.param
    )
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = Case.make(tiny.tiny_dir(), tmp_path_factory.mktemp("tiny") / "s")
    yield made
    made.store.close()


def memory(shape, slots, *, host=None, scope="layer", budget=None, staging=2):
    """A cache of `slots` experts per layer; `host` experts in host memory, the rest on
    SSD.
    """
    size = CacheSize.for_model(shape, scope=scope, slots_per_layer=slots)
    limited = None
    if host is not None:
        host_bytes = host * shape.max_expert_bytes
        limited = CacheSize.for_model(shape, scope="global", total_bytes=host_bytes)
    return MemoryPlan(size, limited, staging, budget)


def some_residual(shape):
    vectors = np.random.default_rng(0).normal(0, 0.1, (shape.layers, shape.hidden))
    return Residual(vectors.astype(np.float32))


def test_logits_are_exact_for_every_policy(case):
    """Each combination with other sizes, with and without SSD, at batch 1 or 4 with
    prompts of unequal length.

    Four architectures share all combinations between them; `test_families` runs all.
    """
    turn = ARCHITECTURES.index(case.local.name)
    for one, combination in list(enumerate(ALL))[turn::4]:
        slots = one % (case.shape.experts + 1)
        host = None if one % 2 else one % 7
        batch = 4 if one % 3 == 0 else 1
        scope = "global" if one % 5 == 0 else "layer"
        sizes = memory(case.shape, slots, host=host, scope=scope)
        options = {"batch": batch, "residual": some_residual(case.shape)}
        live, *_ = case.run(system_of(combination), sizes, **options)
        verdict = verify(case.plain, live.result.passes, "float32")
        assert verdict.passed, (combination, slots, host, batch, verdict)
        assert verdict.logits == batch * 4 * case.shape.vocab


def test_prompts_that_the_model_cannot_read_are_named():
    embeddings = SimpleNamespace(num_embeddings=10)
    model = SimpleNamespace(get_input_embeddings=lambda: embeddings)
    for tokens, found in (([], "none"), ([3, 12], "token 12")):
        local = SimpleNamespace(model=model, encode=lambda _, tokens=tokens: tokens)
        with pytest.raises(
            TraceError, match=f"expected tokens below 10, found {found};"
        ):
            encode(local, ["a"])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("host", [None, 24])
def test_the_shipped_model_is_exact_with_prefetching(trained, batch, host):
    system = System("greedy", "lru", "residual")
    sizes = memory(trained.shape, 8, host=host)
    live, _, timeline, _, _ = trained.run(
        system, sizes, batch=batch, residual=some_residual(trained.shape), new=6
    )
    assert verify(trained.plain, live.result.passes, "float32").passed
    figures = summarise(timeline)
    assert figures["prefetched"] > 0
    assert (figures["bytes"]["ssd"] > 0) == (host is not None)


def test_a_core_of_its_own_is_given_back_after_the_run(trained):
    before = os.sched_getaffinity(0)
    live, *_ = trained.run(System("greedy"), memory(trained.shape, 8), own_cores=True)
    assert verify(trained.plain, live.result.passes, "float32").passed
    assert os.sched_getaffinity(0) == before


def test_padding_is_not_computed(trained):
    """Prompts of 4 and 7 tokens: the prefill serves 11 tokens in every layer, not
    14.
    """
    live, _, timeline, _, _ = trained.run(
        System("greedy"), memory(trained.shape, 8), batch=2, new=1
    )
    first = live.result.steps[0]
    assert (first.phase, first.tokens) == (Phase.PREFILL, 11)
    assert first.context_tokens == 7
    assert {len(layer.routing) for layer in first.layers} == {11}
    accesses = timeline.access_frame().query("step == 0")
    assert accesses.groupby("layer")["tokens"].sum().tolist() == [44] * 6


def test_sequences_that_have_ended_are_not_computed(trained, monkeypatch):
    """One of two sequences ends: from then on each layer serves one token, routed as in
    a recording of the plain model.
    """
    prompts = [list(b"    raise ValueError("), list(b"import os\n")]
    sizes = memory(trained.shape, 8)
    free, *_ = trained.run(
        System("greedy"), sizes, batch=2, new=8, prompts=prompts, keep=False
    )
    first, second = free.result.tokens
    end = next(token for token in first[1:] if token not in second)
    for model in (trained.plain, trained.offloaded.model):
        monkeypatch.setattr(model.generation_config, "eos_token_id", end)

    live, _, timeline, _, _ = trained.run(
        System("greedy"), sizes, batch=2, new=8, prompts=prompts
    )
    assert verify(trained.plain, live.result.passes, "float32").passed
    decode = live.result.steps[1:]
    sequences = [step.sequences for step in decode]
    assert [step.tokens for step in decode] == sorted(sequences, reverse=True)
    assert {step.tokens for step in decode} == {1, 2}
    for step in decode:
        assert {len(layer.routing) for layer in step.layers} == {step.tokens}
    served = timeline.access_frame().groupby(["step", "layer"])["tokens"].sum()
    assert set(served.loc[decode[-1].step]) == {trained.shape.top_k}

    local = LocalModel("tiny", trained.plain)
    recorder = GateRecorder(local, scores=False, predictions=False, residual=None)
    with recorder.open(prompts, 8):
        generate(local, prompts, 8, recorder.note)
    computed = [
        (layer.layer, *sorted(experts.tolist()))
        for step in live.result.steps
        for layer in step.layers
        for experts in layer.routing
    ]
    rows = [recorder.rows(row, len(prompt)) for row, prompt in enumerate(prompts)]
    recorded = [
        (layer, *sorted(experts.tolist()))
        for row in rows
        for layer, experts in zip(row["layer"], row["experts"], strict=True)
    ]
    assert sorted(computed) == sorted(recorded)


def test_views_of_a_live_run_give_the_same_plans_elsewhere(trained, tmp_path):
    """What gates decided goes through a file; a fresh planner, fed with it and with what
    the run saw, plans alike.
    """
    system = System("greedy", "lru", "residual")
    sizes = memory(trained.shape, 8, host=30)
    residual = some_residual(trained.shape)
    live, log, _, fresh, _ = trained.run(system, sizes, batch=2, residual=residual)
    save_routing(tmp_path / "routing.npz", live.result.steps)
    steps = load_routing(tmp_path / "routing.npz")
    plans = repeat(log.entries, fresh, steps)
    assert len(plans) == len(live.result.steps) * 6
    broken = [
        e._replace(answer=()) if e.call == "plan" and e.arguments[0] == 2 else e
        for e in log.entries
    ]
    again = trained.run(system, sizes, new=0, residual=residual)[3]
    with pytest.raises(PolicyError, match="decision log: plan at step 2, layer 0"):
        repeat(broken, again, steps)


def test_verify_refuses_work_ahead_before_anything_is_loaded(tmp_path):
    from moesim.runs.live import run_live

    options = {"verify": True, "routing": "as-recorded", "store": tmp_path / "s"}
    message = r"--verify: assignment policy 'daop.*approximation"
    with pytest.raises(PolicyError, match=message):
        run_live("tiny", ["x"], "daop", hw=host_profile(), **options)


def test_a_model_of_words_without_tokenizer_is_refused_before_it_runs(
    tmp_path, monkeypatch
):
    """Not fed bytes, and not run for nothing before its check."""
    from moesim.runs import live

    folder = make_checkpoint("mixtral", tmp_path / "m", vocab_size=300)
    monkeypatch.setattr(live, "open_model_store", lambda *_: pytest.fail("too late"))
    words = {"hw": host_profile(), "store": tmp_path / "s", "verify": True}
    with pytest.raises(TraceError, match=r"tokenizer\.model, .*vocab\.json"):
        live.run_live(folder, ["x"], "greedy", **words)


def test_a_check_without_room_for_the_whole_model_loses_no_run(tmp_path, monkeypatch):
    from moesim.runs import live

    def no_room(*_):
        raise MemoryError

    monkeypatch.setattr(tiny, "load_weights", no_room)
    options = {"store": tmp_path / "s", "out": tmp_path / "out", "new_tokens": 1}
    with pytest.raises(MemoryError):
        live.run_live(
            "tiny", ["x"], "greedy", hw=host_profile(), verify=True, **options
        )
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_any_kind_is_found(tmp_path, monkeypatch, name):
    import transformers

    (tmp_path / name).write_text("")
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: "reads words"
    )
    assert load_tokenizer(tmp_path, family("mixtral").model) == "reads words"


class Unchanged(RoutingPolicy):
    """The gate's own choice, in arrays of its own."""

    def route(self, gate, view, routing):
        experts = np.asarray(gate.experts)
        for n, expert in enumerate(experts.reshape(-1)):
            routing[n] = expert
        return experts.shape[1]


def test_a_routing_policy_that_changes_nothing_changes_no_bit(tmp_path):
    """Mixtral weighs in float32 what it computes in bfloat16."""
    model = make_checkpoint("mixtral", tmp_path / "m")
    case = Case.make(model, tmp_path / "s", dtype="bfloat16")
    with case.store, registered(routing_unchanged=Unchanged):
        runs = [
            case.run(System("greedy", routing=routing), memory(case.shape, 4), batch=2)
            for routing in ("as-recorded", "unchanged")
        ]
    passes = [live.result.passes for live, *_ in runs]
    for one, other in zip(*passes, strict=True):
        assert torch.equal(one.logits, other.logits)


class FirstRowNextDoor(RoutingPolicy):
    """Serve the first token of a layer step by the expert after the one its gate chose."""

    def route(self, gate, view, routing):
        experts = np.array(gate.experts)
        experts[0] = (experts[0] + 1) % view.experts
        for n, expert in enumerate(experts.reshape(-1)):
            routing[n] = expert
        return experts.shape[1]


def test_a_token_whose_experts_stay_keeps_its_weights_to_the_bit(trained):
    """Two sequences; only tokens of the first are served by others. The second's logits
    are the plain model's.
    """
    with registered(**{"routing_first-row-next-door": FirstRowNextDoor}):
        system = System("greedy", routing="first-row-next-door")
        live, *_ = trained.run(system, memory(trained.shape, 8), batch=2)
    passes = live.result.passes
    assert not verify(trained.plain, passes, "float32").passed
    cache = None
    with torch.inference_mode():
        for one in passes:
            past = None if one.fresh else cache
            out = trained.plain(**one.inputs, past_key_values=past, use_cache=True)
            cache = out.past_key_values
            expected = out.logits[1, -1]
            off = float((expected - one.logits[1]).abs().max())
            assert off <= TOLERANCES["float32"] * float(expected.abs().max())


@pytest.mark.parametrize(
    ("dtype", "label"), [("float32", "fp32"), ("bfloat16", "bf16")]
)
def test_a_live_shape_names_the_dtype_of_its_store(tmp_path, dtype, label):
    from moesim.runtime.executor.live import live_shape
    from moesim.runtime.models.offloaded import OffloadedModel
    from moesim.runtime.store.build import build_store

    folder = make_checkpoint("mixtral", tmp_path / "m")
    with build_store(folder, tmp_path / "s", dtype=dtype) as store:
        offloaded = OffloadedModel.load(folder, dtype=getattr(torch, dtype))
        assert live_shape(offloaded, folder, store).dtype == label


def test_an_oracle_is_refused_by_name(trained):
    with pytest.raises(PolicyError, match="'belady' is an oracle"):
        trained.run(System("greedy", "belady"), memory(trained.shape, 8))


def test_residual_prefetch_without_vectors_says_how_to_get_them(trained):
    with pytest.raises(PolicyError, match="--residual FILE"):
        trained.run(System("greedy", "lru", "residual"), memory(trained.shape, 8))


# -- CUDA ------------------------------------------------------------------------------


@pytest.fixture
def launching():
    """The code for accelerators, with streams and events of no device."""
    return StreamDevice(FakeAccelerator())


def test_device_times_stay_sharp_in_a_long_run(launching, monkeypatch):
    """A product of 20 us, 3 hours into a run: counted from its beginning, float32 would
    make 0 or 1 ms of it.
    """
    from types import SimpleNamespace

    clock = [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    launching.begin(40.0)
    told = []
    timeline = SimpleNamespace(
        span=lambda *span, start_s, end_s, nbytes: told.append(
            (*span, start_s, end_s, nbytes)
        )
    )
    clock[0] += 3 * 3600
    launching.step_done(timeline)
    operation = SimpleNamespace(lane=0, kind=0, step=1, layer=0, expert=3, nbytes=0)
    clock[0] += 1.0
    launching.begin_compute(operation, 0)
    clock[0] += 20e-6
    assert launching.end_compute(operation) == (-1.0, -1.0), "the device tells later"
    launching.step_done(timeline)
    ((_, _, _, _, _, start_s, end_s, _),) = told
    assert end_s - start_s == pytest.approx(20e-6, abs=2e-6)
    assert start_s == pytest.approx(10.0 + 3 * 3600 + 1.0, abs=1e-4)


def test_a_serial_cpu_waits_for_what_was_only_launched(trained, launching, monkeypatch):
    """Where the device computes by itself, the last fetched product has been computed,
    not only launched.
    """
    waits = []
    settle = type(launching).settle
    monkeypatch.setattr(
        type(launching), "settle", lambda self: (waits.append(1), settle(self))
    )
    profile = host_profile(LAUNCHED, cores=8, **{"costs.cpu.flops_per_s": 1e9})
    on_device = {"profile": profile, "device": launching}
    live, _, timeline, _, _ = trained.run(
        System("fiddler", "lru"), memory(trained.shape, 4), batch=4, **on_device
    )
    assert verify(trained.plain, live.result.passes, "float32").passed
    accesses = timeline.access_frame()
    fetched = accesses[(accesses["lane"] == "gpu0") & (accesses["state"] != "hit")]
    assert len(waits) == fetched.groupby(["step", "layer"]).ngroups > 0
    assert (accesses["lane"] == "cpu").any()


if torch.cuda.is_available():

    @pytest.mark.gpu
    @pytest.mark.parametrize("combination", ALL[::5])
    def test_cuda_is_exact(tmp_path_factory, combination):
        """The plain model on the CPU says the same, within float32 sums in another
        order.
        """
        from moesim.runtime.accelerators import Cuda

        folder = tmp_path_factory.mktemp("cuda")
        on_gpu = Case.make(tiny.tiny_dir(), folder / "s", device="cuda")
        profile = host_profile(LAUNCHED, accelerator="cuda", cores=8)
        on_device = {"profile": profile, "device": StreamDevice(Cuda())}
        residual = some_residual(on_gpu.shape)
        sizes = memory(on_gpu.shape, 8, host=40)
        live, log, _, fresh, _ = on_gpu.run(
            system_of(combination), sizes, batch=4, residual=residual, **on_device
        )
        assert verify(on_gpu.plain, live.result.passes, "float32").passed
        repeat(log.entries, fresh, live.result.steps)
        on_gpu.store.close()
