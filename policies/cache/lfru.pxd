cimport cython
from moesim.policies.cache.lfu cimport LFU
from moesim.policies.ranked_cache cimport lowest

cdef class LFRU(LFU):
    cdef public double[::1] rate

    @cython.locals(c=Py_ssize_t, key="long long")
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
