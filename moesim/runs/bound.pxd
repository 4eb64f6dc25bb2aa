cimport cython

cpdef _least_of_steps(const long long[::1] edges, const double[::1] cpu_s, const double[::1] gpu_s, const double[::1] firsts_s, const double[::1] back_s, double[::1] further_s)
cpdef least_makespans(const double[::1] cpu_s, const double[::1] gpu_s, const double[::1] firsts_s, double back_s)
#? _cpu_price(cpu_s, gpu_s)
#? _make_convex(values)
cpdef long long _misses(const long long[::1] edges, const long long[::1] keys, long long size) except? -1
#? _push(heap_step, heap_key, entries, step, key)
#? _pop(heap_step, heap_key, entries)
