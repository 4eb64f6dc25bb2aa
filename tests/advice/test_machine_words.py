"""Machines in words: the tables of devices, memory and links, what is refused."""

import pytest

from moesim.advice.devices import (
    graphics_cards,
    parse_memory,
)
from moesim.advice.machine import Grade, describe_machine, machine_of_profile
from moesim.advice.times.priors import textbook_priors
from moesim.base.errors import AdviceError
from moesim.base.units import parse_bytes


def test_bandwidths_are_bus_times_rate():
    """Figures that their makers print: 448, 288, 936 and 1,792 GB/s."""
    cards = graphics_cards()
    stated = {"RTX 5060 Ti 16GB": 448, "RTX 4060 Ti 16GB": 288, "RTX 3090": 936}
    for name, rate in {**stated, "RTX 5090": 1792}.items():
        assert cards[name].bytes_per_s == pytest.approx(rate * 1e9, rel=0.001)


@pytest.mark.parametrize(
    ("text", "size_gib", "rate"),
    [
        ("2x16GB DDR4-3600", 32, 57.6e9),
        ("2x16GB-DDR4-3600", 32, 57.6e9),
        ("64 GB DDR5-6000", 64, 96e9),
        ("1x16GB DDR4-3200", 16, 25.6e9),
        ("128GB, 80 GB/s", 128, 80e9),
        ("64GB", 64, None),
    ],
)
def test_memory_in_words(text, size_gib, rate):
    memory = parse_memory(text, channels=2)
    assert memory.size_bytes == size_gib * 1024**3
    assert memory.peak_bytes_per_s == rate


def test_the_longest_name_counts_and_makers_may_be_left_out():
    machine = describe_machine(
        cpu="AMD Ryzen 7 5700X 8-Core Processor", gpu="NVIDIA GeForce RTX 5060 Ti"
    )
    assert machine.processor.name == "Ryzen 7 5700X"
    assert machine.graphics[0].name == "RTX 5060 Ti 16GB"
    assert machine.grade is Grade.SPEC


def test_a_chip_with_one_memory_has_no_link():
    machine = describe_machine(cpu="M4 Max", ram="128GB")
    assert machine.unified
    assert machine.device_bytes_per_s == 546e9
    # Soldered memory is no module: as wide as the chip says.
    halo = describe_machine(cpu="Ryzen AI Max+ 395", ram="128GB LPDDR5X-8000")
    assert halo.device_bytes_per_s == 256e9


def test_devices_in_numbers():
    machine = describe_machine(
        cpu="cores=6,ghz=3", ram="2x16GB DDR4-3200", gpu="vram=16GB,bandwidth=448GB/s"
    )
    assert machine.processor.cores == 6
    assert machine.vram_bytes == parse_bytes("16GiB")
    assert machine.device_bytes_per_s == 448e9


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"gpu": "RTX 9999"}, "--gpu 'RTX 9999': not among the"),
        ({"gpu": "RTX 4061 Ti"}, "did you mean"),
        ({"cpu": "Ryzen 77 1"}, "--cpu 'Ryzen 77 1': not among the"),
        ({"gpu": "vram=16GB"}, "expected bandwidth="),
        ({"gpu": "vram=0GB,bandwidth=448"}, "more than 0 bytes"),
        ({"gpu": "vram=16GB,bandwidth=fast"}, "expected a number, got 'fast'"),
        ({"gpu": "vram=16GB,bandwidth=448,colour=red"}, "unknown word 'colour=red'"),
        ({"cpu": "cores=0"}, "expected a number above 0"),
        ({"gpu": "RTX 3060", "pcie": "9.0x3"}, "--pcie '9.0x3': expected generation"),
        ({"gpu": "RTX 3060", "pcie": "4.0x7"}, "PCIe 4x7"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_way_out(words, expected):
    with pytest.raises(AdviceError) as caught:
        describe_machine(**words)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_measured_profile_is_a_probed_machine():
    machine = machine_of_profile("two-core-host", ram="16GB")
    assert machine.grade is Grade.PROBED
    assert machine.processor.cores == 2
    assert not machine.graphics
    # What its experts reached when it was measured.
    assert max(machine.probes.host_read.values()) == pytest.approx(7.8e9, rel=0.01)


@pytest.mark.parametrize(("card", "read_bytes_per_s"), [
    ("RTX 3090", 430e9),
    ("RTX 4090", 700e9),
])  # fmt: skip
def test_codebooks_cost_a_card_arithmetic(card, read_bytes_per_s):
    """An 8B model in IQ3_XXS, measured in llama.cpp#8215: the bandwidths differ by 8 %."""
    machine = describe_machine(cpu="Ryzen 9 5950X", ram="64GB", gpu=card)
    priors = textbook_priors(machine)
    names = ("device_read", "device_reach", "reach:lookup")
    read, reach, lookup = (priors[name].value for name in names)
    assert read * reach * lookup == pytest.approx(read_bytes_per_s, rel=0.05)
