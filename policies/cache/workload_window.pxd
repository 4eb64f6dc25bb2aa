cimport cython
from moesim.policies.base cimport Work
from moesim.policies.cache._own_replacements cimport ReplacingCache

cdef int NONE, PREFILL, RESIDENT

cdef class WorkloadWindow(ReplacingCache):
    cdef public long long window, swaps
    cdef public bint literal, gain_only, prefill
    cdef public long long[::1] steps
    cdef signed char[::1] may_enter, may_leave
    @cython.locals(done="long long", expert=int, key="long long", landed=bint, count=Py_ssize_t)
    cpdef long long replacements(self, Work work, const signed char[::1] states, long long[::1] outgoing, long long[::1] incoming) except? -1
    @cython.locals(count=Py_ssize_t, busiest=int, idlest=int, gains=bint)
    cdef Py_ssize_t _paired(self, long long first, long long[::1] outgoing, long long[::1] incoming) except? -1
    @cython.locals(best=int, most=double, value=double, expert=int)
    cdef int _largest(self, long long first, double sign, signed char[::1] among) except? -1
