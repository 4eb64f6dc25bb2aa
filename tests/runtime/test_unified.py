"""A machine whose CPU and GPU compute from one memory: nothing is copied."""

from dataclasses import replace

import pytest

from moesim.hwprofiles.profile import load_profile
from moesim.hwprofiles.schema import Quantity
from moesim.policies.base import PolicyError
from moesim.runs import replay as api


def machine(**numbers):
    split = load_profile("rtx4060ti")
    one = {"memory.unified": Quantity(1, "published", "one memory")}
    given = {
        name: Quantity(value, "assumed", "test") for name, value in numbers.items()
    }
    return replace(split, name="one-memory", numbers={**split.numbers, **one, **given})


@pytest.mark.parametrize(
    "policy", ["on-demand", "greedy", "all-cpu", "dali", "deepspeed"]
)
def test_every_expert_is_where_both_compute_from_it(policy):
    run = api.replay("tiny", policy, hw=machine(), steps=6)
    assert run.metrics["hits"] == run.metrics["accesses"] > 0
    assert set(run.metrics["bytes"].values()) == {0}
    kinds = set(run.timeline.frame()["kind"])
    assert kinds == {"compute", "dense", "plan", "join"}


def test_the_same_machine_with_two_memories_copies():
    run = api.replay("tiny", "on-demand", hw="rtx4060ti", steps=6)
    assert run.metrics["bytes"]["h2d0"] > 0


@pytest.mark.parametrize(
    "memory", [{"cache_ratio": 0.5}, {"slots_per_layer": 2}, {"host_memory_bytes": 1}]
)
def test_sizes_of_memories_that_are_not_there_are_refused(memory):
    with pytest.raises(PolicyError, match=r"one-memory has one memory .*; drop it"):
        api.replay("tiny", "greedy", hw=machine(), steps=1, **memory)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(PolicyError, match="choose a smaller model or format"):
        api.replay("tiny", "greedy", hw=machine(**{"memory.host_bytes": 1000}), steps=1)


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "mps"])
def test_each_kind_of_accelerator_is_found_by_its_own_class(monkeypatch, kind):
    """Stand-ins of torch's own answers, each as that build of torch gives them."""
    import torch

    from moesim.runtime.accelerators import accelerator_here

    types = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "mps": "mps"}
    monkeypatch.setattr(torch.version, "hip", "6.3" if kind == "rocm" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: types[kind] == "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device(types[kind])
    )
    found = accelerator_here()
    assert (found.kind, found.device.type) == (kind, types[kind])
    assert found.page_locks == (kind != "mps")
    # Torch's CUDA calls serve CUDA and ROCm alone: other streams are their own blocks.
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: "a call for CUDA")
    is_of_cuda = found.on("a stream") == "a call for CUDA"
    assert is_of_cuda == (types[kind] == "cuda")


def test_a_machine_without_any_has_the_host_accelerator(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    from moesim.runtime.accelerators import accelerator_here

    assert accelerator_here() is None
