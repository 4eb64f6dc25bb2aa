cimport cython
from moesim.policies.base cimport CachePolicy, Work

cdef int NONE

cdef class RankedCache(CachePolicy):
    cdef public int layers, experts
    cdef public double[::1] score, tie

cdef class OutscoringCache(RankedCache):
    cdef long long[::1] worst, order

@cython.locals(count=Py_ssize_t, kept=Py_ssize_t, rank=Py_ssize_t, c=Py_ssize_t, n=Py_ssize_t, j=Py_ssize_t, key="long long", other="long long")
cpdef void lowest(const long long[::1] candidates, const double[::1] score, const double[::1] tie, long long[::1] best)

@cython.locals(n=Py_ssize_t, rank=Py_ssize_t, key="long long")
cpdef void by_descending_score(long long[::1] keys, const double[::1] score)

@cython.locals(count=Py_ssize_t, rank=Py_ssize_t, n=Py_ssize_t, key="long long")
cpdef outscored(const long long[::1] incoming, const long long[::1] candidates, const double[::1] score, long long[::1] worst, long long[::1] order, long long[::1] chosen)
