cimport cython

cdef double inf
cdef int NOTHING, ON_GPU, ON_CPU, ON_LINK

cdef class ListScheduler:
    cdef public int gpus
    cdef public bint soonest_end, stealing
    cdef public const double[::1] cpu_s
    cdef public const double[:, ::1] gpu_s
    cdef public double[:, ::1] arrive_s
    cdef public unsigned char[:, ::1] flying
    cdef public double[::1] link_s
    cdef public int[::1] falling, rising
    cdef double[:, ::1] lands_s
    cdef double[::1] gpu_end_s
    cdef unsigned char[::1] for_gpu, cached, barred, fetched, done
    cdef int uncomputed, uncached, stolen, copied
    cdef int kind, device, chosen
    cdef double cpu_end_s, cpu_extra_s, key_s, end_s
    @cython.locals(i=int, j=int, falling="int[::1]", rising="int[::1]")
    cpdef sort(self, const int[::1] tokens, int active)
    @cython.locals(ordered=int, remaining=int, i=int, g=int, makespan_s=double)
    cpdef double simulate(self, int active, double first_s, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(g=int, i=int, lands_s=double, copy_s=double, arrive_s=double)
    cdef _begin(self, int active, double first_s)
    @cython.locals(g=int)
    cdef _next(self, int active)
    @cython.locals(key_s=double)
    cdef void _offer(self, int kind, int device, int i, double start_s, double end_s) noexcept
    @cython.locals(n=int, i=int, best=int, free_s=double, start_s=double, begin_s=double)
    cdef _offer_gpu(self, int g, int active)
    @cython.locals(n=int, i=int, end_s=double)
    cdef _offer_cpu(self, int active)
    @cython.locals(i=int)
    cdef int _lowest(self, int active, int n, bint cached) except? -1
    @cython.locals(g=int, i=int, best=int, comes=bint, start_s=double)
    cdef _offer_link(self, int active)
