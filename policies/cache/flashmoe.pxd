cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache._scoring cimport evaluate, features_of, note_use
from moesim.policies.ranked_cache cimport RankedCache, lowest

cdef class FlashMoE(RankedCache):
    cdef long long size
    cdef double[::1] weights, age, uses, features, first_units, second_units, outputs
    cdef signed char[::1] stale
    @cython.locals(end="long long")
    cpdef accessed(self, Work work)
    @cython.locals(n=Py_ssize_t, layer="long long")
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
    @cython.locals(first="long long", end="long long", expert=int)
    cdef _score(self, long long layer)
