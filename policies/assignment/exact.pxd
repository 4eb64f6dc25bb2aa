cimport cython
from moesim.policies.assignment._contended cimport PlannedInTime
from moesim.policies.assignment._optimum cimport OptimumSearch
from moesim.policies.base cimport Work

cdef class Exact(PlannedInTime):
    cdef OptimumSearch one, several
    @cython.locals(search=OptimumSearch, i=int)
    cpdef plan(self, Work work, signed char[::1] lanes, long long[::1] order)
