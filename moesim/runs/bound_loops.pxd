cimport cython

@cython.locals(most="long long", begin="long long", end="long long", values="double[::1]", orders="long long[:, ::1]", least="double[::1]", least_s="double[::1]", total_s=double)
cpdef least_of_steps(const long long[::1] edges, const double[::1] cpu_s, const double[::1] gpu_s, const double[::1] firsts_s, const double[::1] back_s, double[::1] further_s)

cpdef least_makespans(const double[::1] cpu_s, const double[::1] gpu_s, const double[::1] firsts_s, double back_s)

@cython.locals(by_trade="long long[::1]", by_cpu="long long[::1]", by_gpu="long long[::1]", price=double, on_cpu_s=double, on_gpu_s=double, traded_s=double, cpu_first_s=double, gpu_first_s=double, after_s=double, either_s=double, both_s=double)
cdef _fill_makespans(const double[::1] cpu_s, const double[::1] gpu_s, const double[::1] firsts_s, double back_s, double[::1] values, long long[:, ::1] orders, double[::1] least_s)

@cython.locals(place="long long")
cdef _sort(const double[::1] values, Py_ssize_t count, long long[::1] order)

@cython.locals(i="long long", on_cpu_s=double, on_gpu_s=double)
cdef double _cpu_price(const double[::1] cpu_s, const double[::1] gpu_s, double[::1] ratios, long long[::1] order) except? -1

@cython.locals(last="long long", before="long long", rise=double, slope=double, begin="long long", end="long long", i="long long", count="long long")
cdef _make_convex(double[::1] values, long long[::1] corners)

@cython.locals(experts="long long", at="long long", following="long long[::1]", next_step="long long[::1]", cached="long long[::1]", heap_step="long long[::1]", heap_key="long long[::1]", held="long long", missed="long long", entries="long long", key="long long", latest="long long", victim="long long")
cpdef long long count_misses(const long long[::1] edges, const long long[::1] keys, long long size) except? -1

@cython.locals(above="long long", place="long long")
cdef _push(long long[::1] heap_step, long long[::1] heap_key, long long entries, long long step, long long key)

@cython.locals(below="long long", place="long long", step="long long", key="long long")
cdef _pop(long long[::1] heap_step, long long[::1] heap_key, long long entries)
