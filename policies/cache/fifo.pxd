from moesim.policies.ranked_cache cimport RankedCache

cdef class FIFO(RankedCache):
    cdef public double entries
