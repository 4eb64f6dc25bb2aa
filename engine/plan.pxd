cimport cython

cdef class Copies:
    cdef public Py_ssize_t count
    cdef public int[::1] kind, gpu
    cdef public long long[::1] key, other
    @cython.locals(n=Py_ssize_t)
    cpdef add(self, int kind, int gpu, long long key, long long other)

cdef class Plan:
    cdef public int flags
    cdef public double exposed_s
    cdef public bint has_precomputed, defers, begins_ahead
    cdef public signed char[::1] lanes
    cdef public long long[::1] order
    cdef public Copies copies, promoted, swaps, asked, released
    cdef public unsigned char[::1] precomputed, deferred
    cdef public int[::1] ahead_tokens
