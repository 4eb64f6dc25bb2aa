from moesim.policies.ranked_cache cimport RankedCache

cdef class LRU(RankedCache):
    cdef public double now
