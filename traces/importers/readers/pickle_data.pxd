cimport cython

cpdef _first_stop(const unsigned char[::1] data, long long[::1] argument_bytes, long long[:, ::1] stack_effects, unsigned char[::1] is_put)
