"""What a trace adds to advice: a bound of any schedule, and kt-kernel's masks."""

import json
import shlex

import numpy as np
import pytest
from support.command_line import refused
from support.small_trace import write_trace

from moesim.advice.advise import advise
from moesim.advice.plan.what_if import shape_of
from moesim.advice.routing import DecodeSteps, decode_steps, expert_mask
from moesim.base.errors import AdviceError
from moesim.runs.bound import DEVICE, HOST, LINK, Bandwidths, routing_bound
from moesim.traces.format.schema import ModelShape
from moesim.traces.synthetic.generate import stated, synthesise

MODEL = "qwen3-30b-a3b"
PC = {"cpu": "Ryzen 7 5700X", "ram": "2x16GB DDR4-3600", "gpu": "RTX 4060 Ti 16GB"}
WORDS = [word for key, value in PC.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("routing") / "t.parquet"
    shape = shape_of(advise(MODEL, **PC).model)
    synthesise(stated(shape, skew=0.8, reuse=0.3, new_tokens=32), path, tokens=64)
    return path


@pytest.fixture(scope="module")
def advice(trace):
    return advise(MODEL, **PC, trace=trace)


def test_a_bound_of_bytes_by_hand():
    """Four accesses of 10 bytes. On the CPU m, of 3 reads: host max(m, 3) x 10 / 10,
    link (3 - m) x 10 / 5, card (4 - m) x 10 / 40 + 2.
    """
    rates = Bandwidths(host=10.0, link=5.0, device=40.0)
    bound = routing_bound([10] * 4, 3, 2, 40.0, rates)
    # m = 2: host 3, link 2, card 2.5. No m takes less than the 3 reads from host.
    assert (bound.seconds, bound.resource) == (3.0, HOST)
    assert bound.steps_per_s == pytest.approx(2 / 3)

    slow_link = Bandwidths(host=1e9, link=5.0, device=40.0)
    assert routing_bound([10] * 4, 0, 2, 40.0, slow_link).resource == DEVICE
    slow_cpu = Bandwidths(host=1.0, link=0.5, device=1e9)
    # 20 s on the CPU for 2, 20 s on the link for 1; but 30 bytes leave host memory.
    assert routing_bound([10] * 4, 3, 1, 0.0, slow_cpu).seconds == 30.0
    assert routing_bound([10] * 4, 4, 1, 0.0, Bandwidths(9e9, 1.0, 9e9)).resource in {
        HOST,
        LINK,
    }


@pytest.mark.parametrize("seed", range(20))
def test_no_split_of_drawn_accesses_is_below_it(seed):
    """Any choice of accesses for the CPU, as many copies as it leaves to be read."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 50, 12)
    rates = Bandwidths(*draw.uniform(1, 20, 3))
    reads = int(draw.integers(0, 13))
    bound = routing_bound(sizes.tolist(), reads, 3, 7.0, rates)
    for _ in range(200):
        on_cpu = draw.random(12) < draw.random()
        copies = max(0, reads - int(on_cpu.sum()))
        # A copy serves an access that the CPU does not.
        copied = draw.permutation(sizes[~on_cpu])[:copies].sum()
        host_s = (sizes[on_cpu].sum() + copied) / rates.host
        card_s = (21.0 + sizes[~on_cpu].sum()) / rates.device
        assert bound.seconds <= max(host_s, copied / rates.link, card_s) + 1e-12


def test_the_bound_of_any_schedule_is_above_every_advised_speed(advice):
    bound = advice.routing.bound
    for prospect in advice.prospects:
        assert prospect.decode.value < bound.steps_per_s
    for plan in advice.routing.masks:
        assert plan.decode.value < bound.steps_per_s
    # Better places exist than those of whole layers, so it lies above that bound.
    assert bound.steps_per_s > advice.bound.tokens_per_s
    assert 0 <= bound.reads < bound.accesses


def test_masks_as_kt_kernel_makes_them():
    counts = np.array([[5, 0, 4, 1], [9, 8, 7, 0], [0, 1, 0, 2]])
    frequency = expert_mask("frequency", 2, counts)
    assert frequency.sum() == 6
    # The six most used of the whole model: five of two layers, and one of the third.
    assert [row.sum() for row in frequency] == [2, 3, 1]
    assert (
        expert_mask("uniform", 2, counts).tolist() == [[True, True, False, False]] * 3
    )
    front = expert_mask("front-loading", 2, counts)
    assert [row.sum() for row in front] == [4, 2, 0]


def test_frequency_serves_most_on_the_card_and_is_ranked_first(advice):
    plans = advice.routing.masks
    speeds = [plan.decode.value for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    by_name = {plan.strategy: plan for plan in plans}
    assert plans[0].strategy == "frequency"
    assert by_name["frequency"].on_card > by_name["uniform"].on_card
    # Whole layers on the card are what llama.cpp does with the same memory.
    front = by_name["front-loading"].decode.value
    assert front == pytest.approx(advice.best.decode.value, rel=0.05)
    # Nobody measured kt-kernel: its interval is wider.
    assert plans[0].decode.spread > advice.best.decode.spread


def test_halves_share_no_text():
    step = (np.array([0]),)
    several = DecodeSteps("t", (step,) * 6, (0, 0, 0, 0, 1, 2))
    first, second = several.halves()
    assert set(first.sequence).isdisjoint(second.sequence)
    assert len(first.steps) + len(second.steps) == 6
    early, late = DecodeSteps("t", (step,) * 4, (7,) * 4).halves()
    assert len(early.steps) == len(late.steps) == 2


def test_the_file_of_counts_is_what_the_engine_loads(command, trace, tmp_path):
    """A three-dimensional ``logical_count`` over all layers, read with weights only."""
    torch = pytest.importorskip("torch", reason="the runtime extra is not installed")
    words = ("--trace", trace, "--expert-counts", "counts.pt")
    code, out, err = command("advise", MODEL, *WORDS, *words)
    assert code == 0, err
    line = next(line for line in out.splitlines() if "sglang.launch_server" in line)
    flags = shlex.split(line)
    assert flags[flags.index("--init-expert-location") + 1] == "counts.pt"
    assert flags[flags.index("--kt-method") + 1] == "LLAMAFILE"

    loaded = torch.load(tmp_path / "cwd" / "counts.pt", weights_only=True)
    counts = loaded["logical_count"]
    assert tuple(counts.shape) == (1, 48, 128)
    # Every decode step uses eight experts in each layer.
    assert set(counts.sum(dim=2).flatten().tolist()) == {8 * int(counts.sum()) // 384}


def test_json_has_bound_and_masks(command, trace):
    code, out, err = command("advise", MODEL, *WORDS, "--trace", trace, "--json")
    assert code == 0, err
    routing = json.loads(out)["routing"]
    assert routing["bound"]["steps_per_s"] > 0
    assert routing["ktransformers"][0]["strategy"] == "frequency"


def test_a_card_that_kt_kernel_does_not_know_gets_the_bound_only(trace):
    other = advise(MODEL, **PC | {"gpu": "RX 7900 XTX"}, trace=trace)
    assert other.routing.masks == ()
    assert other.routing.bound.steps_per_s > other.best.decode.value


def test_routing_that_says_nothing_is_refused(command, tmp_path, trace):
    assert refused(
        command("advise", "olmoe-1b-7b", *WORDS, "--trace", trace),
        "expected routing of olmoe-1b-7b, 16 MoE layers of 64 experts",
    )
    words = ("--cpu", PC["cpu"], "--ram", PC["ram"], "--trace", trace)
    assert refused(command("advise", MODEL, *words), "all the same which experts lie")
    assert refused(
        command("advise", MODEL, *WORDS, "--expert-counts", "c.pt"), "--trace"
    )
    table = ("--trace", trace, "--expert-counts", "counts.csv")
    assert refused(command("advise", MODEL, *WORDS, *table), "ends in .pt")

    shape = ModelShape("prompts", 48, 128, 8, 8, 8, (100,) * 48, 1)
    prompts = write_trace(tmp_path / "p.parquet", shape, ((3, 0),))
    model = advise(MODEL, **PC).model
    with pytest.raises(AdviceError, match="at least two decode steps"):
        decode_steps(prompts, model)
