cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache._own_replacements cimport ReplacingCache

cdef class DecayedFrequency(ReplacingCache):
    cdef public double decay, margin

    @cython.locals(i=Py_ssize_t, key="long long")
    cpdef accessed(self, Work work)
