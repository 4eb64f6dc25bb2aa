cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache._own_replacements cimport ReplacingCache
from moesim.policies.ranking cimport best_of

cdef int PREFILL, RESIDENT
cdef double _TOLERANCE

cdef class PrefillSwap(ReplacingCache):
    cdef public double share, margin
    cdef public bint released, idle
    cdef long long[::1] hot, cold, tokens
    cdef double[::1] falling, rising
    cdef unsigned char[::1] absent, settled, every
    @cython.locals(enters="unsigned char[::1]", leaves="unsigned char[::1]", hottest=Py_ssize_t, coldest=Py_ssize_t, count=Py_ssize_t, n=Py_ssize_t, hot="long long", cold="long long")
    cpdef long long replacements(self, Work work, const signed char[::1] states, long long[::1] outgoing, long long[::1] incoming) except? -1
    @cython.locals(expert=int, i=int, key="long long", tokens="long long", landed=bint)
    cdef _sort_out(self, Work work, const signed char[::1] states)
    @cython.locals(needed=double, enough=bint)
    cdef bint _is_clear(self, long long hot, long long cold) except? -1
