"""A streamed copy is a copy: every byte, no byte more, wherever it begins and ends."""

import platform

import pytest

torch = pytest.importorskip("torch", reason="the runtime extra is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from moesim.machine_code.library import optimised  # noqa: E402
from moesim.runtime.store.memory import COPY_CODE, streamed  # noqa: E402


@given(
    nbytes=st.integers(0, 1500),
    begin=st.sampled_from((0, 1, 16, 32, 64)),
    into=st.sampled_from((0, 8, 32, 96)),
)
def test_a_streamed_copy_moves_exactly_what_it_was_asked_for(nbytes, begin, into):
    source = torch.randint(0, 256, (2048,), dtype=torch.uint8)
    target = torch.full((2048,), 7, dtype=torch.uint8)
    streamed(target[into:], source[begin:], nbytes)
    assert torch.equal(target[into : into + nbytes], source[begin : begin + nbytes])
    assert (target[:into] == 7).all()
    assert (target[into + nbytes :] == 7).all()


def test_whole_blocks_are_stored_past_the_caches():
    """An x86 processor's instruction for it is in the machine code."""
    if platform.machine() != "x86_64":
        pytest.skip("another processor has another instruction")
    module, machine = optimised(COPY_CODE)
    assert "movnt" in machine.emit_assembly(module)
