cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment, flying
from moesim.policies.base cimport MachineView, Work

cdef int CPU, DEFERRED, PREFILL

cdef class FixedMapping(SpreadAssignment):
    cdef public bint waits, fetches_prompts
    cdef public int deferred, kept
    @cython.locals(i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(gpu=int, i=int)
    cdef _allow_arrivals(self, Work work)
