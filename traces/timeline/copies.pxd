cimport cython

cpdef follow_copies(?Structure copies, ?Structure accesses, long long[:, :, ::1] present_step, signed char[:, :, ::1] prefetch, long long[::1] counts)
