cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment
from moesim.policies.base cimport MachineView, Work

cdef int WAITS

cdef class LayerWise(SpreadAssignment):
    cdef public long long large_tokens
    cdef const unsigned char[::1] on_one, on_several
    @cython.locals(on_gpu=bint, uploads=bint)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
