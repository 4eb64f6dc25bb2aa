cimport cython

cpdef _add_overlaps(const long long[::1] predicted, const long long[::1] truth, long long layer, double[:, ::1] by_layer, double[:, ::1] by_rank)
