from moesim.policies.cache.ranked cimport RankedCache

cdef class FIFO(RankedCache):
    cdef public double entries
