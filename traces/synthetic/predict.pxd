cimport cython

cpdef _add_moments(const float[:, ::1] logits, double[:, :, ::1] sums, long long[::1] counts)
