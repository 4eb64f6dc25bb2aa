cimport cython
from moesim.policies.assignment._placing cimport flying, transfer_s
from moesim.policies.base cimport AssignmentPolicy, Work

cdef double inf
cdef int CPU

cdef class TwoPointers(AssignmentPolicy):
    cdef int[::1] sequence
    cdef unsigned char[::1] group
    cdef double[::1] cpu_s, link_s, gpu_end_s
    cdef double[:, ::1] gpu_s, arrive_s
    cdef unsigned char[:, ::1] flying
    cdef double end_s
    @cython.locals(g=int, i=int)
    cdef take_costs(self, Work work)
    @cython.locals(g=int, i=int)
    cdef watch_links(self, Work work)
    @cython.locals(i=int, j=int, sequence="int[::1]")
    cdef sort(self, Work work)
    cdef bint _follows(self, Work work, int a, int b) except -1
    @cython.locals(g=int, i=int, n=int, head=int, tail=int, last=int, cpu_end_s=double)
    cdef head_and_tail(self, Work work, double first_s, signed char[::1] lanes, long long[::1] order)
    @cython.locals(g=int, best=int, lands_s=double, end_s=double)
    cdef int _soonest(self, Work work, int i) except? -1
    cdef _give(self, int g, int i)
