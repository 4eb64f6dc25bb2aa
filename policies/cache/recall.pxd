cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache._own_replacements cimport ReplacingCache
from moesim.policies.ranked_cache cimport outscored
from moesim.policies.routing_memory cimport RoutingMemory

cdef class Recall(ReplacingCache):
    cdef public RoutingMemory memory
    cdef long long[::1] worst, order
    @cython.locals(worth="double[::1]")
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
    @cython.locals(margin=double)
    cpdef long long replacements(self, Work work, const signed char[::1] states, long long[::1] outgoing, long long[::1] incoming) except? -1
