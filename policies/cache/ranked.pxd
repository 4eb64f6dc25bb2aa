cimport cython
from moesim.policies.base cimport CachePolicy, Work

cdef int NONE

cdef class RankedCache(CachePolicy):
    cdef public int layers, experts
    cdef public double[::1] score, tie

@cython.locals(count=Py_ssize_t, kept=Py_ssize_t, rank=Py_ssize_t, c=Py_ssize_t, n=Py_ssize_t, j=Py_ssize_t, key="long long", other="long long")
cpdef void lowest(const long long[::1] candidates, const double[::1] score, const double[::1] tie, long long[::1] best)
