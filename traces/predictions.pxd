cimport cython

@cython.locals(experts=Py_ssize_t, most=Py_ssize_t, best="long long[::1]", s=Py_ssize_t, t=Py_ssize_t, expert=Py_ssize_t, score=float, kept=Py_ssize_t, rank=Py_ssize_t, j=Py_ssize_t, n=Py_ssize_t)
cpdef tally_layer_steps(const float[:, ::1] scores, const long long[::1] row_edges, has_target, Py_ssize_t top_k, Py_ssize_t predictor, int[:, :, ::1] workload, float[:, :, ::1] sums)
