cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment
from moesim.policies.base cimport MachineView, Work

cdef double inf

cdef class StaticThreshold(SpreadAssignment):
    cdef public bint sums
    cdef public int least_tokens
    @cython.locals(i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(gpu=int, resident=bint, best_s=double, wait_s=double, compute_s=double)
    cdef bint _on_gpu(self, Work work, int i) except -1
