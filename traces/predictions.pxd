cimport cython

@cython.locals(experts=Py_ssize_t, top_k=Py_ssize_t, t=Py_ssize_t, kept=Py_ssize_t, expert=Py_ssize_t, score=float, rank=Py_ssize_t, j=Py_ssize_t, n=Py_ssize_t)
cdef _tally(const float[:, ::1] scores, Py_ssize_t first, Py_ssize_t last, long long[::1] best, int[::1] workload, float[::1] sums)
@cython.locals(best="long long[::1]")
cpdef tally(const float[:, ::1] scores, Py_ssize_t top_k, int[::1] workload, float[::1] sums)
@cython.locals(best="long long[::1]", s=Py_ssize_t)
cpdef tally_layer_steps(const float[:, ::1] scores, const long long[::1] row_edges, has_target, Py_ssize_t top_k, Py_ssize_t predictor, int[:, :, ::1] workload, float[:, :, ::1] sums)
