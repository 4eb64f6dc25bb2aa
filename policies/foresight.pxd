cimport cython
from moesim.policies.base cimport Work

cdef int NONE

cdef class Foresight:
    cdef public int layers, experts
    cdef public long long last
    cdef public double growth
    cdef public double[::1] value
    cdef public const double[::1] values_after
    cdef public long long[::1] next_step
    cdef public const long long[::1] edges
    cdef public const int[::1] used, following
    @cython.locals(now="long long", first="long long", key="long long", use="long long")
    cpdef foresee(self, Work work)

@cython.locals(use=Py_ssize_t, key="long long")
cdef _value_uses(const long long[::1] keys, const double[::1] saved, const double[::1] discounts, double[::1] after, double[::1] values)
