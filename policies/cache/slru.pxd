cimport cython
from moesim.policies.cache._request_lists cimport RequestCache

cdef int NONE

cdef class SLRU(RequestCache):
    cdef public int segments
    cdef public bint enters_free

    @cython.locals(level=int)
    cpdef hit(self, int pool, long long key)
    @cython.locals(level=int, victim="long long")
    cpdef long long miss(self, int pool, long long key) except? -1
    @cython.locals(level=int)
    cpdef fill(self, int pool, long long key)
    cdef long long _share(self, int pool) except -1
    cdef bint _is_full(self, int pool, int level) except? -1
    @cython.locals(segment="long long", oldest="long long")
    cdef _put(self, int pool, long long key, int level)
