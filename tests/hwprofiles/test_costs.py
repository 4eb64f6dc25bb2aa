"""Costs are arithmetic: each is checked by hand, then carried to sizes that were never
measured.
"""

import numpy as np
import pytest
from support.raw_profiles import number, raw_profile

from moesim.hwprofiles.costs import Costs, Kernels
from moesim.hwprofiles.paths import RooflinePaths
from moesim.hwprofiles.profile import list_profiles, load_profile, parse_profile
from moesim.hwprofiles.roofline import RooflineModel
from moesim.hwprofiles.schema import ProfileError
from moesim.traces.format.schema import ModelShape

MB = 1_000_000
ONE = np.array([1])


def shape(expert_bytes=(8 * MB, 8 * MB), **changes):
    """H 1000, F 1000: 6 MFLOP per token and expert."""
    counts = {"layers": len(expert_bytes), "experts": 8, "top_k": 2}
    widths = {"hidden": 1000, "expert_intermediate": 1000}
    sizes = {"expert_bytes": expert_bytes, "other_bytes": 0}
    return ModelShape("hand", **counts | widths | sizes | changes)


def roofline(overhead_s, bytes_per_s, flops_per_s):
    values = map(number, (overhead_s, bytes_per_s, flops_per_s))
    return dict(zip(RooflinePaths._fields, values, strict=True))


def costs(tables, model=None):
    profile = parse_profile(raw_profile(costs=tables), where="hw.toml")
    return Costs(profile, model or shape())


def points(tokens, seconds, hidden=1000, intermediate=1000, expert_bytes=8 * MB):
    widths = {"hidden": hidden, "intermediate": intermediate}
    reference = widths | {"bytes": expert_bytes, "dtype": "bf16"}
    curve = {"tokens": tokens, "seconds": seconds, "reference": reference}
    return curve | {"kind": "published", "source": "a test"}


def test_an_expert_is_flat_while_reading_dominates_and_linear_after():
    """8 MB at 8 GB/s is 1 ms; 6 MFLOP per token at 60 GFLOP/s is 0.1 ms: the border is
    at 10 tokens. A layer of half the bytes reads half as long, and tables grow when a
    prefill asks for more tokens.
    """
    known = costs({"cpu": roofline(1e-4, 8e9, 60e9)}, shape((8 * MB, 4 * MB)))
    seconds = known.cpu_s(0, np.array([0, 1, 10, 20, 100]))
    assert seconds == pytest.approx([0.0, 1.1e-3, 1.1e-3, 2.1e-3, 10.1e-3])
    assert known.cpu_s(1, np.array([[1, 100_000]])) == pytest.approx(
        np.array([[0.6e-3, 10.0001]])
    )


@pytest.mark.parametrize(("tokens", "seconds", "at", "expected"), [
    ([1, 5, 21], [2e-3, 4e-3, 12e-3], [1, 3, 5, 13, 21], [2e-3, 3e-3, 4e-3, 8e-3, 12e-3]),
    # Beyond the last it follows the roofline: 2.2 ms at 21 tokens, 4.3 at 42.
    ([1, 21], [2e-3, 12e-3], [42], [12e-3 * 4.3 / 2.2]),
    # A dip is noise.
    ([1, 2, 3, 4], [1e-3, 5e-3, 3e-3, 6e-3], [1, 2, 3, 4], [1e-3, 4e-3, 4e-3, 6e-3]),
])  # fmt: skip
def test_measured_points_are_met_and_interpolated_between(
    tokens, seconds, at, expected
):
    known = costs(
        {"cpu": roofline(1e-4, 8e9, 60e9) | {"points": points(tokens, seconds)}}
    )
    assert known.cpu_s(0, np.array(at)) == pytest.approx(expected)
    assert known.extrapolated == ()


def test_other_sizes_follow_by_bytes_while_reading_and_by_flops_while_computing():
    """Measured at 8 MB, 1000 x 1000; asked at 2 MB, 1000 x 500: a quarter of the bytes,
    half of the FLOPs.
    """
    tables = {
        "cpu": roofline(0.0, 8e9, 60e9) | {"points": points([1, 100], [3e-3, 30e-3])}
    }
    smaller = costs(tables, shape((2 * MB,), expert_intermediate=500))
    assert smaller.cpu_s(0, np.array([1, 100])) == pytest.approx([3e-3 / 4, 30e-3 / 2])
    assert smaller.extrapolated == (
        (
            "cpu: experts of 1000 x 500, 2000000 bytes, from published 1000 x 1000,"
            " 8000000 bytes (bf16)"
        ),
    )


def test_a_copy_is_latency_plus_bytes_over_bandwidth():
    link = {"latency_s": number(2e-5), "bytes_per_s": number(10e9)}
    ssd = {"latency_s": number(1e-4), "bytes_per_s": number(4e9)}
    known = costs({"h2d": link, "d2h": link, "ssd": ssd})
    assert known.copy_s(0) == known.writeback_s(0) == pytest.approx(8.2e-4)
    assert known.read_s(1) == pytest.approx(2.1e-3)


def test_measured_copies_are_interpolated_by_bytes():
    curve = {"bytes": [4 * MB, 8 * MB, 12 * MB], "seconds": [1e-3, 1.5e-3, 2e-3]}
    curve |= {"kind": "published", "source": "a test"}
    link = {"latency_s": number(2e-5), "bytes_per_s": number(10e9), "points": curve}
    known = costs({"h2d": link}, shape((2 * MB, 4 * MB, 8 * MB, 22 * MB)))
    assert [known.copy_s(layer) for layer in range(4)] == pytest.approx(
        [5.1e-4, 1e-3, 1.5e-3, 3e-3]
    )


def test_the_dense_part_reads_weights_and_keys_or_computes():
    """One layer, H 100, 2 query and 1 key head of 50, 8 experts: attention
    2*100*(100+50), gate 800: 30,800 weights.

    At 2 bytes each, 10 tokens of context and 2 sequences: 61,600 + 2*50*2*10*2 = 65,600
    B at 1 MB/s.
    """
    model = shape(
        (MB,), hidden=100, heads=2, kv_heads=1, head_dim=50, other_bytes=61_600
    )
    reading = costs({"dense": roofline(0.5, 1e6, 1e15)}, model)
    assert reading.dense_s(2, 10, 2) == pytest.approx(0.5 + 0.0656)
    # Keys and values, 4,000 bytes, at a rate of their own.
    attention = {"bytes_per_s": number(0.4e6)}
    apart = costs({"dense": roofline(0.5, 1e6, 1e15), "attention": attention}, model)
    assert apart.dense_s(2, 10, 2) == pytest.approx(0.5 + 0.0616 + 0.01)
    passes = np.array([[2], [10], [2]])
    assert apart.dense_of_passes(*passes)[0] == pytest.approx(0.5 + 0.0616 + 0.01)
    computing = costs({"dense": roofline(0.0, 1e15, 1e6)}, model)
    assert computing.dense_s(2, 10, 2) == pytest.approx(
        (2 * 30_800 * 2 + 4 * 100 * 2 * 10) / 1e6
    )


def test_a_prefill_token_sees_the_keys_before_it():
    """4 tokens of one sequence see 1 + 2 + 3 + 4 = 10 keys."""
    model = shape(
        (MB,), hidden=100, heads=2, kv_heads=1, head_dim=50, other_bytes=61_600
    )
    computing = costs({"dense": roofline(0.0, 1e15, 1e6)}, model)
    assert computing.dense_s(4, 4, 1) == pytest.approx(
        (2 * 30_800 * 4 + 4 * 100 * 10) / 1e6
    )


def test_bytes_outside_the_experts_are_conserved():
    """All layers once and the head with its equally large embedding are `other_bytes`,
    whatever the weights' type.
    """
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 250}
    dense = {"shared_intermediate": 300, "dense_intermediate": 700, "vocab": 500}
    others = {"dense_layers": (0,), "other_bytes": 123_456_789}
    model = shape((MB, MB), **heads, **dense, **others)
    reading = costs({"dense": roofline(0.0, 1.0, 1e15)}, model)
    kept = 2 * 500 * 2  # one token's keys and values in one layer
    layer = 2 * 1000 * 1500 + 8000 + 3 * 1000 * 300
    dense = 2 * 1000 * 1500 + 3 * 1000 * 700
    total = 2 * layer + dense + 2 * 500_000
    # Only single rows of the embedding are read.
    expected = 123_456_789 * (total - 500_000) / total
    assert 2 * (reading.dense_s(1, 1, 1) - kept) + reading.head_s(1) == pytest.approx(
        expected
    )


def test_planning_falls_back_to_the_default_and_grows_with_active_experts():
    planning = {
        "default": {"base_s": number(1e-5), "per_expert_s": number(1e-6)},
        "ilp": {"base_s": number(1e-3), "per_expert_s": number(0.0)},
    }
    known = costs({"planning": planning})
    assert known.planning_terms("greedy") == (1e-5, 1e-6, 0.0, 0.0)
    assert known.planning_terms("ilp:seconds=1") == (1e-3, 0.0, 0.0, 0.0)
    assert known.least_planning_s(np.array([8, 2000])) == pytest.approx([1.8e-5, 1e-3])


def test_activations_move_in_and_out_at_two_bytes():
    """DAOP measures 0.02 ms at one token: the latency; 10 tokens of 1000 add 40 kB."""
    known = costs(
        {"activation": {"latency_s": number(2e-5), "bytes_per_s": number(1e9)}}
    )
    assert known.activation_s(10) == pytest.approx(2e-5 + 4e-5)


def test_a_missing_cost_is_missed_only_when_it_is_needed():
    known = costs({"h2d": {"latency_s": number(0.0), "bytes_per_s": number(1e9)}})
    assert known.copy_s(0) == pytest.approx(8e-3)
    with pytest.raises(
        ProfileError, match=r"hw\.toml: costs\.ssd\.latency_s: this number is needed"
    ):
        known.read_s(0)
    with pytest.raises(ProfileError, match=r"costs\.cpu\.overhead_s"):
        known.cpu_s(0, ONE)


@pytest.mark.parametrize("name", list_profiles())
def test_every_machine_that_ships_can_run_qwen3(name):
    model = ModelShape(
        "qwen3-30b-a3b", 48, 128, 8, 2048, 768, (9_437_184,) * 48, 3_000_000_000,
        heads=32, kv_heads=4, head_dim=128, vocab=151_936,
    )  # fmt: skip
    known = Costs(load_profile(name), model)
    tokens = np.arange(1, 2049)
    for seconds in (known.cpu_s(0, tokens), known.gpu_s(0, tokens)):
        assert (np.diff(seconds) >= -1e-12).all()
        assert 1e-6 < seconds[0] < 1e-2
    assert 1e-4 < known.copy_s(0) < 1e-2
    assert known.dense_s(1, 100, 1) < 1e-1
    assert 0 < known.planning_terms("greedy")[0] < 1e-3


def test_the_published_table_stays_what_was_published():
    """Phi-mini-MoE on an RTX 3090, one token: w1 + w2 + w3 = 11,693 + 14,643 + 11,562
    ns, launched by itself; one more of a group takes that less 9.9 us, and 0.28 us.
    """
    model = shape((23_592_960,), hidden=4096, expert_intermediate=960)
    hw = load_profile("rtx3090-epyc7532")
    alone = Costs(hw, model, kernels=Kernels(grouped=False))
    assert alone.gpu_s(0, ONE) == pytest.approx([37_898e-9])
    further_s = Costs(hw, model).gpu_s(0, ONE)
    assert further_s == pytest.approx([37_898e-9 - 9.9e-6 + 0.28e-6])


@pytest.mark.parametrize("lane", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["two-core-host", "rtx3090-epyc7532"])
def test_carried_times_never_fall_with_tokens_bits_or_size(name, lane):
    """Experts between and beyond the measured sizes: never below bytes over the best
    bandwidth nor FLOPs over the best peak, and more of anything never takes less.
    """
    machine = load_profile(name)
    roof = RooflineModel.of(machine, lane)
    tokens = np.arange(1, 2049)
    for hidden, intermediate in (
        (2048, 768),
        (2048, 1024),
        (4096, 1536),
        (4096, 14336),
    ):
        by_bits = []
        for bits in (4.25, 4.85, 8.5, 16, 32):
            expert_bytes = int(3 * hidden * intermediate * bits / 8)
            model = shape(
                (expert_bytes,), hidden=hidden, expert_intermediate=intermediate
            )
            known = Costs(machine, model)
            seconds = (known.cpu_s if lane == "cpu" else known.gpu_s)(0, tokens)
            assert (np.diff(seconds) >= 0).all()
            by_bits.append(seconds)
        assert (np.diff(by_bits, axis=0) >= -1e-15).all()
    # A measured point may beat the fitted line a little, and nothing else may.
    flops_s = 6 * 2048 * 1024 * tokens / roof.flops_per_s
    known = Costs(machine, shape((4_079_616,), hidden=2048, expert_intermediate=1024))
    seconds = (known.cpu_s if lane == "cpu" else known.gpu_s)(0, tokens)
    assert (seconds >= 0.8 * np.maximum(flops_s, 4_079_616 / roof.bytes_per_s)).all()


def test_fewer_bits_do_not_save_arithmetic():
    """Measured: 8 MB and 2 MB, both at 60 GFLOP/s (6 and 1.5 MFLOP a token). An expert
    of 8 MFLOP a token in 4 MB lies between them by bytes, above both by FLOPs.
    """
    quarter = {"intermediate": 250, "expert_bytes": 2 * MB}
    small = points([1, 100], [0.25e-3, 2.5e-3], **quarter)
    measured = {"points": points([1, 100], [1e-3, 10e-3]), "points_small": small}
    tables = {"cpu": roofline(0.0, 8e9, 60e9) | measured}
    model = shape((4 * MB,), expert_intermediate=1333)
    assert costs(tables, model).cpu_s(0, np.array([100])) == pytest.approx(
        [100 * 6 * 1000 * 1333 / 60e9]
    )
