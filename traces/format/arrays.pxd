cimport cython

@cython.locals(rows=Py_ssize_t, width=Py_ssize_t, best="int[:, ::1]", best_values="float[::1]", row=Py_ssize_t, kept=Py_ssize_t, place=Py_ssize_t, value=float, rank=Py_ssize_t)
cpdef top_k(const float[:, ::1] values, Py_ssize_t count)
@cython.locals(top=int, row=Py_ssize_t, place=Py_ssize_t, last_row="long long[::1]")
cpdef Py_ssize_t first_repeat(const unsigned short[:, ::1] ids) except -2
@cython.locals(all_finite=bint, at=Py_ssize_t, size="unsigned int", shift="unsigned int", digits="unsigned int", is_odd="unsigned int", rounding="unsigned int", sign="unsigned int")
cpdef bint _round_to_float16(const unsigned int[::1] bits, unsigned short[::1] rounded) except -1
