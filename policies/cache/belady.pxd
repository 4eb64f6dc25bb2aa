cimport cython
from moesim.policies.base cimport Work
from moesim.policies.ranked_cache cimport OutscoringCache, by_descending_score, lowest

cdef double NEVER_AGAIN

cdef class Belady(OutscoringCache):
    cdef public bint must_admit
    cdef public long long never, per_step
    cdef const long long[::1] edges
    cdef const int[::1] uses, following

    @cython.locals(layer_step="long long", use="long long", end="long long", i=Py_ssize_t, expert=int, time=double)
    cpdef accessed(self, Work work)
