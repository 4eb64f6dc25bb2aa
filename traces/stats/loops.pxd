cimport cython

cdef _insert(long long[::1] displaced, long long spot, long long worth)
cdef long long _rebuild_block(long long[::1] stack, int[::1] place, long long begin, long long end, long long[::1] displaced, long long count, long long mask) except? -1

@cython.locals(active="long long[::1]", displaced="long long[::1]", key="long long", depth="long long", worst="long long")
cpdef rebuild_stacks(const signed char[::1] phase, const long long[::1] pool, const long long[::1] edges, const int[::1] keys, const long long[::1] rank, long long[:, ::1] ranked, int[:, ::1] places, long long[::1] filled, long long[:, ::1] latest, long long[:, :, ::1] depths)
