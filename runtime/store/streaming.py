"""Copies past the processor's caches, as copies into a GPU's memory are.

The host accelerator's memory is host memory. A plain copy leaves what it wrote in the
caches, so the product that follows takes half its time (0.25 instead of 0.50 ms for 6.3
MB), and a slot that was used just before is filled in half of its own (0.30 instead of
0.62 ms): which expert went where, and when, would decide the speed of a device that
stands in for one without such caches. Non-temporal stores write straight to memory:
0.31 ms wherever, and 0.5 ms for the product whenever (EPYC, one core;
`benchmarks/runtime_overhead.py` prints the link's share of a plain copy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    import torch

# AVX2's width; a machine without it splits the vector.
_VECTOR_BYTES: Final = 32
_BLOCK_BYTES: Final = 4 * _VECTOR_BYTES


@intrinsic
def _copy_blocks(
    _typing: Any, _target: Any, _source: Any, _nbytes: Any
) -> tuple[Any, Any]:
    """Emit the loop: loads as usual, stores marked non-temporal, a fence behind
    them.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source, nbytes = arguments
        word = ir.IntType(64)
        vector = ir.VectorType(word, _VECTOR_BYTES // 8)
        # LLVM's mark for a non-temporal store is a reference to the constant 1.
        nontemporal = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])

        begin = ir.Constant(word, 0)
        step = ir.Constant(word, _BLOCK_BYTES)
        with cgutils.for_range_slice(builder, begin, nbytes, step, intp=word) as (
            offset,
            _,
        ):
            for part in range(0, _BLOCK_BYTES, _VECTOR_BYTES):
                at = builder.add(offset, ir.Constant(word, part))
                read = builder.inttoptr(builder.add(source, at), vector.as_pointer())
                written = builder.inttoptr(builder.add(target, at), vector.as_pointer())
                value = builder.load(read, align=_VECTOR_BYTES)
                store = builder.store(value, written, align=_VECTOR_BYTES)
                store.set_metadata("nontemporal", nontemporal)

        # Non-temporal stores are not ordered with later ones: without the fence another
        # thread may see the news that the copy is done before it sees the bytes.
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


@numba.njit("void(uint64, uint64, uint64)", nogil=True, cache=True)
def _copy(target: int, source: int, nbytes: int) -> None:
    _copy_blocks(target, source, nbytes)


def streamed(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
    """Copy the first `nbytes` of `source` into `target`, both contiguous uint8 in host
    memory.

    What is not aligned, or left over after full blocks of 128 bytes, is copied as
    usual.
    """
    target_address = target.data_ptr()
    source_address = source.data_ptr()
    # Non-temporal stores fault on addresses that are not aligned.
    aligned = (target_address | source_address) % _VECTOR_BYTES == 0
    blocks_bytes = nbytes - nbytes % _BLOCK_BYTES if aligned else 0
    if blocks_bytes:
        _copy(target_address, source_address, blocks_bytes)
    if blocks_bytes < nbytes:
        target[blocks_bytes:nbytes].copy_(source[blocks_bytes:nbytes])
