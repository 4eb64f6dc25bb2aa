cimport cython

cpdef waits_of_lanes(?Structure rows, long long[::1] place, long long[::1] order, long long[::1] copies, long long[::1] target, double[::1] plan_end_s)
cpdef sum_by_lane(?Structure rows, long long[::1] place, double[::1] waits_s, double[:, ::1] busy_s, double[::1] waited_s)
cpdef long long number_in_order(long long[::1] key, unsigned char[::1] chosen, long long[::1] place) except? -1
