cimport cython
from moesim.policies.cache.lfu cimport LFU
from moesim.policies.ranked_cache cimport lowest

cdef int NONE

cdef class EdgeMoE(LFU):
    cdef public int layer
    cdef double[::1] worth
    @cython.locals(n=Py_ssize_t, key="long long", ahead="long long")
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
