cimport cython
from moesim.policies.cache._request_lists cimport RequestCache

cdef class SIEVE(RequestCache):
    cdef public signed char[::1] used
    cdef public long long[::1] hand

    @cython.locals(queue="long long", victim="long long")
    cpdef long long miss(self, int pool, long long key) except? -1
    @cython.locals(queue="long long")
    cpdef fill(self, int pool, long long key)
