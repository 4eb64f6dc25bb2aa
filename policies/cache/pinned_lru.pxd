cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache.lru cimport LRU
from moesim.policies.ranked_cache cimport lowest

cdef int NONE

cdef class PinnedLRU(LRU):
    cdef public signed char[::1] pinned

    @cython.locals(i=Py_ssize_t)
    cpdef accessed(self, Work work)
    cpdef admitted(self, long long key)
    @cython.locals(n=Py_ssize_t)
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
