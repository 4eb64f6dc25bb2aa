cimport cython

cdef long long _REFUSED
cdef long long _TWO_LINES
cdef long long _COUNTED
cdef long long _NOTHING
cdef long long _INTO
cdef long long _GET
cdef long long _MARK

@cython.locals(stack="unsigned char[::1]", memo="unsigned char[::1]", deepest="long long", height="long long", puts="long long", at="long long", begin="long long", code="long long", size="long long", width="long long", number="unsigned long long", digit="unsigned long long", effect="long long", count="long long", depth="long long")
cpdef _first_stop(const unsigned char[::1] data, const long long[::1] argument_bytes, const long long[:, ::1] stack_effects, const unsigned char[::1] is_put)
