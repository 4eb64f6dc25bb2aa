cimport cython

cdef _insert(long long[::1] displaced, long long spot, long long worth)
cdef long long _rebuild_block(long long[::1] stack, int[::1] place, long long begin, long long end, long long[::1] displaced, long long count, long long mask) except? -1

@cython.locals(active="long long[::1]", displaced="long long[::1]", key="long long", depth="long long", worst="long long")
cpdef rebuild_stacks(const signed char[::1] phase, const long long[::1] pool, const long long[::1] edges, const int[::1] keys, const long long[::1] rank, long long[:, ::1] ranked, int[:, ::1] places, long long[::1] filled, long long[:, ::1] latest, long long[:, :, ::1] depths)

@cython.locals(size="long long", at="long long", place="long long", depth="long long", block="long long", next_place="long long", mark="unsigned char[::1]", sum_of="int[::1]", last_of="long long[::1]", key_at="int[::1]")
cpdef later_used(const signed char[::1] phase, const long long[::1] pool, const long long[::1] edges, const int[::1] keys, unsigned char[:, ::1] marks, int[:, ::1] sums, long long[:, ::1] last, int[:, ::1] used, long long[::1] now, long long[:, :, ::1] depths)
