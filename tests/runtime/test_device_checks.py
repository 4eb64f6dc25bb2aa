"""Checks of an accelerator hold on the host, on one that is as disorderly as CUDA may
be, and on a card where there is one; and they find what is broken.
"""

import pytest
import torch
from support.adversarial_runs import Schedule
from support.broken_devices import BROKEN

from benchmarks import card, device_checks
from benchmarks.device_checks import CHECKS
from moesim.runtime.accelerators import Rehearsal, accelerator_here
from moesim.runtime.executor.device import StreamDevice
from moesim.runtime.measure.experts import Size

torch.set_num_threads(1)
ORDERED = ("slots overwritten behind products", "hidden states on the host")
"""Checks of the order between streams, on one thread."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes at which nothing takes long."""
    if torch.cuda.is_available():
        return
    for name, value in {
        "_HIDDEN": 64,
        "_INTERMEDIATE": 32,
        "_ROUNDS": 6,
        "_LONG_TOKENS": 8,
        "_COPY_BYTES": (4096, 1 << 16),
    }.items():
        monkeypatch.setattr(device_checks, name, value)


@pytest.mark.parametrize("name", CHECKS)
def test_the_host_passes(name):
    assert CHECKS[name](Rehearsal()).verdict == "ok"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_the_card_passes(name):
    finding = CHECKS[name](accelerator_here())
    assert finding.verdict != "fails", finding.outcome


def fault(name, seed):
    """What a check finds on the adversarial device; None where it holds."""
    schedule = Schedule(seed)
    with schedule.drawn(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_checks, "time", schedule.threads)
        try:
            finding = CHECKS[name](schedule.device)
        except AssertionError as error:
            return str(error)
    return None if finding.verdict == "ok" else finding.outcome


@pytest.mark.parametrize("name", ORDERED)
def test_the_disorderly_device_passes(name):
    assert [fault(name, seed) for seed in range(6)] == [None] * 6


@pytest.mark.parametrize("broken", [
    "a copy waits for nobody to land",
    "a copy is awaited by its beginning",
    "a slot is overwritten while a product reads it",
    "the last use is recorded before the product",
    "hidden states are read before they have come",
    "results of the cpu are sent from a buffer that is freed",
    "everything is sent from one buffer",
])  # fmt: skip
def test_what_is_broken_is_found(broken, monkeypatch):
    BROKEN[broken](monkeypatch)
    assert any(fault(name, seed) for name in ORDERED for seed in range(12))


def test_a_copy_back_that_comes_late_is_found(monkeypatch):
    """It says that it is there, and is not."""
    monkeypatch.setattr(StreamDevice, "copy_back", lambda *_: None)
    finding = CHECKS["copies both ways at once"](Rehearsal())
    assert (finding.verdict, finding.outcome) == (
        "fails",
        "a copy back was not there when it said so",
    )


def test_products_that_are_wrong_are_told_by_how_much(monkeypatch):
    straight = device_checks._expected
    monkeypatch.setattr(device_checks, "_expected", lambda *of: straight(*of) * 1.01)
    finding = CHECKS["products in float32"](Rehearsal())
    assert finding.verdict == "fails"
    assert "rounding explains 1e-05" in finding.outcome


def test_a_table_of_products_has_grouped_ones_in_the_format_that_has_them():
    rows = [
        row
        for dtype in (torch.bfloat16, torch.float32)
        for row in card.products(Rehearsal(), Size(64, 32), dtype, (1, 4), seconds=0.0)
    ]
    assert [(row["dtype"], row["tokens"]) for row in rows] == [
        ("bfloat16", 1), ("bfloat16", 4), ("float32", 1), ("float32", 4)
    ]  # fmt: skip
    assert all(row["alone_s"] > 0 for row in rows)
    assert [row["grouped_s"] is not None for row in rows] == [True, True, False, False]


def test_a_card_without_a_counter_says_so():
    assert card.energy(Rehearsal(), Size(64, 32))["reason"]
