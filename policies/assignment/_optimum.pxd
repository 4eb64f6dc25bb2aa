cimport cython
from moesim.policies.assignment._dynamic_program cimport LaneSearch
from moesim.policies.assignment._placing cimport flying, transfer_s
from moesim.policies.base cimport Work

cdef double inf

cdef class OptimumSearch:
    cdef public LaneSearch search
    cdef public double makespan_s, bound_s
    cdef public signed char[::1] lanes
    cdef public long long[::1] order
    cdef double[::1] first_landing_s
    @cython.locals(g=int, waiting=int, choice=int)
    cpdef modelled(self, Work work)
    @cython.locals(residents=int, i=int)
    cpdef scheduled(self, Work work)
    @cython.locals(i=int)
    cdef _take(self, Work work)
    @cython.locals(search=LaneSearch, bit=int, g=int, i=int, refuses=bint, cost_s=double)
    cdef _model(self, Work work, int choice)
    @cython.locals(search=LaneSearch, g=int, i=int, n=int, place=int, order="long long[::1]", landing_s=double, first_s=double)
    cpdef schedule(self, Work work)
    cdef bint _is_before(self, Work work, long long i, long long j) except -1
    @cython.locals(search=LaneSearch, g=int, i=int, forbidden_s=double, copy_s=double)
    cdef _forbid(self, Work work, bint twice)

@cython.locals(g=int)
cdef bint _is_resident(Work work, long long i) except -1
