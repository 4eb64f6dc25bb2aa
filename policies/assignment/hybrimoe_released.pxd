cimport cython
from moesim.policies.assignment._two_pointer cimport TwoPointers
from moesim.policies.base cimport MachineView, Work

cdef double inf, CPU_PER_TOKEN, CPU_FIRST, GPU, COPY
cdef int PREFILL

cdef class HybriMoEReleased(TwoPointers):
    cdef public bint fetches_prompts, own_costs
    @cython.locals(i=int, first_s=double)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(g=int, i=int)
    cdef _take_released(self, Work work)
