cimport cython

cdef int ABSENT, RESIDENT

@cython.locals(i=Py_ssize_t, expert=int)
cpdef look_up(const signed char[:, ::1] state, const double[:, ::1] landing_s, int layer, const int[::1] experts, double now_s, double absent_s, signed char[::1] states, double[::1] wait_s)
@cython.locals(length=Py_ssize_t, i=Py_ssize_t, count=int)
cpdef bint by_tokens(const double[::1] cpu_table_s, const double[::1] gpu_table_s, const int[::1] tokens, double[::1] cpu_s, double[::1] gpu_s) except -1
@cython.locals(i=Py_ssize_t)
cpdef count_holds(short[:, ::1] holds, int layer, const int[::1] experts, int change)
@cython.locals(seen="unsigned char[::1]", i=Py_ssize_t, position="long long")
cpdef bint is_legal(const long long[::1] lanes, const long long[::1] order, Py_ssize_t active, int gpus) except -1
@cython.locals(first_key="long long", count=Py_ssize_t, n=Py_ssize_t, i="long long")
cpdef Py_ssize_t missing(const signed char[::1] lanes, const long long[::1] order, int lane, const signed char[:, ::1] state, int layer, const int[::1] experts, long long[::1] keys) except -1
@cython.locals(i=Py_ssize_t, j=Py_ssize_t)
cpdef bint distinct_members(const long long[::1] chosen, const long long[::1] among) except -1
@cython.locals(n=Py_ssize_t)
cdef bint _contains(const long long[::1] among, long long key) except -1
@cython.locals(experts="long long", count=Py_ssize_t, layer=int, expert=int)
cpdef Py_ssize_t unheld(const signed char[:, ::1] state, const short[:, ::1] holds, int first, int end, long long[::1] keys) except -1
