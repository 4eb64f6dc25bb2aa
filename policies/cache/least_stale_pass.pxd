cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache.least_stale_layer cimport LeastStaleLayer

cdef class LeastStalePass(LeastStaleLayer):
    cdef public int step
    cdef public long long[::1] touched

    @cython.locals(i=Py_ssize_t)
    cpdef accessed(self, Work work)
    @cython.locals(rank="long long")
    cpdef long long rank(self, long long key) except? -1
