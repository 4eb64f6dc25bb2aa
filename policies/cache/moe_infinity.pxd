cimport cython
from moesim.policies.base cimport CachePolicy, Work
from moesim.policies.ranked_cache cimport lowest

cdef int NONE
cdef double _FLOOR

cdef class MoEInfinity(CachePolicy):
    cdef public int layers, experts, layer, batch
    cdef public bint released, in_cache, reset
    cdef public double all_visits
    cdef public double[::1] priority, protected, tokens, layer_tokens, visits
    cdef signed char[::1] counted, unused, active
    @cython.locals(first="long long", key="long long", i=int)
    cpdef accessed(self, Work work)
    @cython.locals(key="long long", layer=int)
    cdef _begin(self)
    @cython.locals(n=Py_ssize_t, key="long long", is_current=bint)
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
    @cython.locals(n=Py_ssize_t, key="long long", layer=int, decays=double, uniform=double, topology=double, ratio=double, visited=double, product=double)
    cpdef rate(self, const long long[::1] keys)
    @cython.locals(half=int, in_first_half=bint)
    cpdef double topology_decay(self, int layer) except? -1.0
