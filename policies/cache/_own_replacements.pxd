cimport cython
from moesim.policies.base cimport CachePolicy, Work
from moesim.policies.ranked_cache cimport RankedCache

cdef int _OUTSIDE, _INSIDE, _PAIRED, NONE, RESIDENT

cdef class NoAdmissionCache(CachePolicy):
    pass

cdef class ReplacingCache(RankedCache):
    cdef public signed char[::1] inside
    @cython.locals(count=Py_ssize_t, n=Py_ssize_t, best="long long", worst="long long")
    cpdef long long pair(self, Work work, const signed char[::1] states, long long[::1] outgoing, long long[::1] incoming, double margin, bint everyone) except? -1
    @cython.locals(n=int, best="long long", key="long long")
    cdef long long _best_absent(self, Work work, bint everyone) except? -1
    @cython.locals(key="long long", worst="long long")
    cdef long long _worst_resident(self, Work work, const signed char[::1] states) except? -1
