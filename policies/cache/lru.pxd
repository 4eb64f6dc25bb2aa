from moesim.policies.cache.ranked cimport RankedCache

cdef class LRU(RankedCache):
    cdef public double now
