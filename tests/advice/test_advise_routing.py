"""What a trace adds to advice: a bound of any schedule."""

import numpy as np
import pytest
from support.command_line import refused
from support.small_trace import write_trace

from moesim.advice.advise import advise
from moesim.advice.plan.what_if import shape_of
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
    bound = advice.routing
    for prospect in advice.prospects:
        assert prospect.decode.value < bound.steps_per_s
    # Better places exist than those of whole layers, so it lies above that bound.
    assert bound.steps_per_s > advice.bound.tokens_per_s
    assert 0 <= bound.reads < bound.accesses


def test_routing_that_says_nothing_is_refused(command, tmp_path, trace):
    assert refused(
        command("advise", "olmoe-1b-7b", *WORDS, "--trace", trace),
        "expected routing of olmoe-1b-7b, 16 MoE layers of 64 experts",
    )
    words = ("--cpu", PC["cpu"], "--ram", PC["ram"], "--trace", trace)
    assert refused(command("advise", MODEL, *words), "all the same which experts lie")
    shape = ModelShape("prompts", 48, 128, 8, 8, 8, (100,) * 48, 1)
    prompts = write_trace(tmp_path / "p.parquet", shape, ((3, 0),))
    with pytest.raises(AdviceError, match="at least two decode steps"):
        advise(MODEL, **PC, trace=prompts)
