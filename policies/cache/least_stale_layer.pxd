cimport cython
from moesim.policies.base cimport Work
from moesim.policies.ranked_cache cimport RankedCache, lowest

cdef class LeastStaleLayer(RankedCache):
    cdef public bint cyclic
    cdef public int layer

    @cython.locals(layer="long long")
    cpdef long long rank(self, long long key) except? -1
    @cython.locals(c=Py_ssize_t)
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
