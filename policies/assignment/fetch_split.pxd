cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment, flying, transfer_s
from moesim.policies.base cimport MachineView, Work

cdef double inf, TOLERANCE

cdef class FetchSplit(SpreadAssignment):
    cdef public double share, link_factor, cpu_factor
    cdef const long long[::1] fetches
    cdef long long[::1] misses
    @cython.locals(residents=int, count=int, n=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(g=int, i=int, count=int, present=bint, here=bint)
    cdef int _keep_present(self, Work work, long long[::1] order) except -1
    @cython.locals(i=int, j=int, count=int)
    cdef _sort_misses(self, Work work, int residents, long long[::1] order)
    @cython.locals(g=int, n=int, count=int, comes=bint)
    cdef int _fetchable(self, Work work, int residents, long long[::1] order) except -1
    @cython.locals(last=int, fewer=int, fetch_s=double, compute_s=double, total_s=double, share=double, fewer_s=double, more_s=double)
    cdef int _fetch_count(self, Work work, int misses) except -1
    @cython.locals(g=int, n=int, total_s=double)
    cdef double _mean_fetch_s(self, Work work, int misses) except? -1
    @cython.locals(n=int, i=int, total_s=double)
    cdef double _mean_compute_s(self, Work work, int misses) except? -1
