cimport cython
from moesim.policies.cache._request_lists cimport RequestCache

cdef class Clock(RequestCache):
    cdef public long long rounds
    cdef public long long[::1] uses

    @cython.locals(queue="long long", victim="long long")
    cpdef long long miss(self, int pool, long long key) except? -1
