cimport cython

@cython.locals(expert=Py_ssize_t, rank=Py_ssize_t, n=Py_ssize_t, count=Py_ssize_t)
cpdef Py_ssize_t best_of(const double[::1] scores, const unsigned char[::1] among, long long[::1] best) except? -1
