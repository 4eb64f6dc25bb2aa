cimport cython
from moesim.policies.assignment._two_pointer cimport TwoPointers
from moesim.policies.base cimport MachineView, Work

cdef double inf
cdef int CPU, PREFILL

cdef class SMoEBalancer(TwoPointers):
    cdef public bint guarded, fetches_prompts
    @cython.locals(i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(g=int, i=int, n=int, misses=int, head=int, tail=int, cpu_end_s=double, compute_s=double, stays=bint)
    cdef _load_or_compute(self, Work work, signed char[::1] lanes, long long[::1] order)
    @cython.locals(g=int, lane=int)
    cdef int _where(self, Work work, int i) except -1
    @cython.locals(g=int, best=int, comes=bint)
    cdef int _free_link(self, Work work, int i) except? -1
