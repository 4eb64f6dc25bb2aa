cimport cython
from moesim.policies.base cimport Work
from moesim.policies.ranked_cache cimport RankedCache

cdef class LFU(RankedCache):
    cdef public double decay, now
    cdef public bint forgets, dates_entries, dates_uses
    cdef public signed char[::1] counted

    @cython.locals(i=Py_ssize_t, key="long long")
    cpdef accessed(self, Work work)
