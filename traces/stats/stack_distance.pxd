cimport cython

cpdef lru_stack(const signed char[::1] phase, const long long[::1] pool, const long long[::1] edges, const int[::1] keys, long long[:, ::1] ranked, unsigned char[:, ::1] known, long long[::1] filled, long long[::1] clock, long long[:, :, ::1] depths)
#? _insert(displaced, spot, worth)
#? _rebuild_block(stack, place, begin, displaced, count, mask)
cpdef belady_stack(const signed char[::1] phase, const long long[::1] pool, const long long[::1] edges, const int[::1] keys, const long long[::1] following, long long[:, ::1] ranked, int[:, ::1] places, long long[::1] filled, long long[:, ::1] latest, long long[:, :, ::1] depths)
cpdef long long _bits_set(unsigned long long word) except? -1
cpdef later_used(const signed char[::1] phase, const long long[::1] edges, const int[::1] keys, unsigned long long[::1] marks, int[::1] sums, long long[::1] last, long long[::1] used, long long[::1] clock, long long[:, ::1] depths)
