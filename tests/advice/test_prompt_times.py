"""What the terms of a prompt depend on, and how: each rate counts where it should, once."""

from dataclasses import replace

import pytest

from moesim.advice.machine import describe_machine
from moesim.advice.times.priors import STAGED_PASSES, priors_of
from moesim.advice.times.step_times import prefill_terms
from moesim.advice.times.work import ExpertGroup, PrefillWork, Setting

WORDS = {"cpu": "Core i9-13900K", "gpu": "RTX 3090", "ram": "2x32GB DDR5-4200"}
MACHINE = describe_machine(**WORDS)
GROUP = ExpertGroup(
    experts=8, top_k=2, stored_bytes=8e8, weights=1e8, host_format="q4_k"
)
WORK = PrefillWork(
    chunks={(512, 0): 3},
    groups={GROUP: 4, replace(GROUP, host_format=""): 4},
    device_dense_weights=1e9,
    host_dense_weights=1e8,
    device_bytes=2e9,
    layers=8,
    attention_widths={(4096, 0): 8},
    ssd_share=0.25,
)
RATES = {name: prior.value for name, prior in priors_of(MACHINE).items()}
RATES |= {"upload_floor_s": 0.0, "tile": 0.0}


SETTING = Setting(gpu_from_tokens=32, page_locked=False, used_only=False)


def terms(rates=RATES, **changes):
    return prefill_terms(replace(WORK, **changes), MACHINE, SETTING, rates)


@pytest.mark.parametrize(
    ("rate", "changed"),
    [
        # rate -> terms that take half as long where it is twice as high
        ("upload", {"upload"}),
        ("pageable", {"upload"}),
        ("device_read", {"gpu weights"}),
        ("flops_reach", {"gpu products", "attention"}),
        ("attention_reach", {"attention"}),
        ("core_flops", {"cpu other layers"}),
        ("ssd_read", {"ssd"}),
    ],
)
def test_twice_a_rate_is_half_of_its_terms(rate, changed):
    before = terms()
    after = terms(RATES | {rate: 2 * RATES[rate]})
    for name, seconds in before.items():
        share = 0.5 if name in changed else 1.0
        assert after[name] == pytest.approx(share * seconds), name


def test_terms_by_hand():
    """Three micro-batches; every expert of a layer is uploaded, used or not."""
    found = terms(RATES | {"upload_floor_s": 1e-3, "tile": 16.0})
    link = RATES["upload"] * RATES["pageable"]
    assert found["upload"] == pytest.approx(3 * 4 * (8e8 / link + 1e-3))
    assert found["gpu kernels"] == pytest.approx(3 * 8 * RATES["batch_layer_s"])
    # All eight experts are used by 512 tokens, and padded by 16 rows each; twice as
    # many layers as are in host memory are computed on the card.
    rows = 512 * 2 + 16 * 8
    flops = 2 * (2 * 4 * rows * 1e8 + 512 * 1e9)
    rate = MACHINE.device_flops * RATES["flops_reach"]
    assert found["gpu products"] == pytest.approx(3 * flops / rate, rel=0.01)
    assert found["ssd"] == pytest.approx(
        3 * 4 * 8e8 * 0.25 / (2 * RATES["ssd_read"]), rel=0.06
    )


def test_uploads_are_as_fast_as_the_slower_of_wire_and_memory():
    """Far apart, the slower decides; never faster than either."""
    for pcie in ("3.0 x4", "4.0 x16"):
        machine = describe_machine(**WORDS, pcie=pcie)
        priors = priors_of(machine)
        wire = 0.82 * machine.link_bytes_per_s
        memory = 0.95 * priors["host_read"].value
        slower = min(wire, memory)
        assert 2 ** (-1 / 6) * slower <= priors["upload"].value < slower


@pytest.mark.parametrize(("backend", "sharpness"), [("cuda", 6), ("vulkan", 1)])
def test_a_staging_buffer_overlaps_but_under_vulkan(backend, sharpness):
    card = replace(MACHINE.graphics[0], backend=backend)
    machine = replace(MACHINE, graphics=(card,))
    priors = priors_of(machine)
    passes = STAGED_PASSES * priors["upload"].value / priors["host_read"].value
    expected = (1 + passes**sharpness) ** (-1 / sharpness)
    assert priors["pageable"].value == pytest.approx(expected, rel=0.02)


def test_measured_links_are_taken_nearly_as_they_are():
    """A probe counts a tenth too much, a statement a twentieth; a datasheet says least."""
    probed = replace(MACHINE, probes=replace(MACHINE.probes, link=1e10))
    stated = replace(MACHINE, link_measured=True)
    uploads = [priors_of(each)["upload"] for each in (probed, stated, MACHINE)]
    assert uploads[0].value == pytest.approx(0.9e10, rel=0.01)
    assert uploads[1].value == pytest.approx(0.95 * stated.link_bytes_per_s, rel=0.01)
    assert uploads[1].spread < uploads[0].spread < uploads[2].spread < 0.5
