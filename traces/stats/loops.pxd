cimport cython

cpdef count_decode(const long long[::1] step, const long long[::1] batch, const long long[::1] layer, const long long[::1] edges, const int[::1] experts, const int[::1] tokens, long long[:, ::1] load, long long[:, ::1] last_use, long long[:, ::1] distances, long long[::1] last_batch, double[::1] overlap, long long[:, ::1] fresh, long long[:, ::1] windows, long long[::1] pairs)

@cython.locals(table="long long[:, ::1]", row="long long[::1]")
cpdef count_pairs(const unsigned short[:, :, ::1] routing, long long[:, :, ::1] joint)

@cython.locals(uses="long long[::1]", experts_with="long long[::1]")
cpdef count_segments(const unsigned short[:, :, ::1] routing, long long width, const long long[::1] lengths, long long[:, :, ::1] covered, long long[:, ::1] segments)

cdef _insert(long long[::1] displaced, long long spot, long long worth)
cdef long long _rebuild_block(long long[::1] stack, int[::1] place, long long begin, long long end, long long[::1] displaced, long long count, long long mask) except? -1

@cython.locals(active="long long[::1]", displaced="long long[::1]", key="long long", depth="long long", worst="long long")
cpdef rebuild_stacks(const signed char[::1] phase, const long long[::1] pool, const long long[::1] edges, const int[::1] keys, const long long[::1] rank, long long[:, ::1] ranked, int[:, ::1] places, long long[::1] filled, long long[:, ::1] latest, long long[:, :, ::1] depths)

@cython.locals(following="long long[::1]")
cpdef next_places(const long long[::1] place, const long long[::1] edges, const int[::1] experts, long long layers, long long width, long long[::1] first_use)

@cython.locals(low="unsigned long long", high="unsigned long long")
cdef long long _bits_set(unsigned long long word) except? -1

@cython.locals(bit="unsigned long long", end="long long", key="long long", place="long long", depth="long long", word="long long")
cpdef later_used(const signed char[::1] phase, const long long[::1] edges, const int[::1] keys, unsigned long long[::1] marks, int[::1] sums, long long[::1] last, long long[::1] used, long long[::1] clock, long long[:, ::1] depths)

@cython.locals(true_rank="long long[::1]")
cpdef add_overlaps(const long long[::1] predicted, const long long[::1] truth, long long layer, double[:, ::1] by_layer, double[:, ::1] by_rank)
