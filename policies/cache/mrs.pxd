cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache._own_replacements cimport ReplacingCache

cdef class MRS(ReplacingCache):
    cdef public double alpha, now
    cdef public bint first_row, touched
    cdef long long[::1] best
    @cython.locals(scores="const double[::1]")
    cpdef accessed(self, Work work)

@cython.locals(kept=Py_ssize_t, expert=Py_ssize_t, rank=Py_ssize_t, n=Py_ssize_t)
cpdef mix(double[::1] average, long long first, const double[::1] scores, double alpha, long long[::1] best)
