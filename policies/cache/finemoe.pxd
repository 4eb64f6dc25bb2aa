cimport cython
from moesim.policies.cache.lfu cimport LFU
from moesim.policies.ranked_cache cimport lowest

cdef class FineMoE(LFU):
    cdef double[::1] expected, worth
    @cython.locals(n=Py_ssize_t, key="long long")
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
