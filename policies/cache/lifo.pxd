from moesim.policies.cache.fifo cimport FIFO

cdef class LIFO(FIFO):
    pass
