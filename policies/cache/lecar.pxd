cimport cython
from moesim.policies.cache._request_lists cimport RequestCache

cdef int NONE, CACHED, LRU_GHOSTS, LFU_GHOSTS
cdef double LEAST_WEIGHT, MOST_WEIGHT

cdef class LeCaR(RequestCache):
    cdef public double learning_rate, discount, initial_weight
    cdef public object draw
    cdef public double[::1] weight, left
    cdef public long long[::1] most_ghosts, now, count, evicted_at

    @cython.locals(count="long long", oldest="long long", rarest="long long", victim="long long", ghosts="long long")
    cpdef long long miss(self, int pool, long long key) except? -1
    cdef _enter(self, int pool, long long key, long long count)
    @cython.locals(rarest="long long", queue="long long", key="long long")
    cdef long long _rarest(self, int pool) except? -1
    @cython.locals(ghosts=int, regret=double, loss=double, lru=double, lfu=double, weight=double)
    cdef long long _recall(self, int pool, long long key) except? -1
