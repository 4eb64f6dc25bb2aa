cimport cython
from moesim.policies.base cimport Work
from moesim.policies.ranked_cache cimport RankedCache

cdef class LeastStaleInterval(RankedCache):
    cdef public double weight, now
    cdef public bint forgets
    cdef public double[::1] last, interval
    cdef public signed char[::1] known

    @cython.locals(i=Py_ssize_t, key="long long")
    cpdef accessed(self, Work work)
    @cython.locals(interval=double)
    cdef _average(self, long long key, double gap)
    cdef _stamp(self, long long key)
