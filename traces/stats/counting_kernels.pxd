cimport cython

cpdef count_decode(const long long[::1] step, const long long[::1] batch, const long long[::1] layer, const long long[::1] edges, const int[::1] experts, const int[::1] tokens, long long[:, ::1] load, long long[:, ::1] last_use, long long[:, ::1] distances, long long[::1] last_batch, double[::1] overlap, long long[:, ::1] fresh, long long[:, ::1] windows, long long[::1] pairs)
cpdef count_pairs(const unsigned short[:, :, ::1] routing, long long[:, :, ::1] joint)
cpdef count_segments(const unsigned short[:, :, ::1] routing, long long width, long long[::1] lengths, long long[:, :, ::1] covered, long long[:, ::1] segments)
