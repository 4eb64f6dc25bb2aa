cimport cython

cdef long long HIT
cdef long long MISS
cdef signed char COMPUTE
cdef signed char PLAN
cdef signed char JOIN
cdef signed char FETCH
cdef signed char READ
cdef long long REFETCH_STEPS
cdef int _COPIED
cdef int _PREFETCHED
cdef signed char _SETTLED
cdef signed char _UNUSED
cdef signed char _MISSED

cdef class Totals:
    cdef public double[::1] busy_s, stall_s
    cdef public long long[::1] bytes
    cdef public double planning_s, start_s, end_s, imbalance
    cdef public long long layer_steps, seen, reached
    cdef public long long copies, refetched, prefetched, used, timely
    cdef public object states, gpu_states, token_states
    cdef long long _cpu
    cdef long long[::1] _gpus
    cdef object _target, _is_gpu
    cdef list _events
    cdef double[:, :, ::1] _landed_s
    cdef int[:, :, ::1] _present_step
    cdef signed char[:, :, ::1] _prefetch
    cdef int[::1] _planned, _computed
    cdef double[::1] _plan_end_s
    cdef double[:, ::1] _idle_from_s, _work_s

    @cython.locals(n="long long", at="long long", on="long long", duration_s=double, code="signed char", idle_from_s=double, copied_s=double)
    cpdef _walk(self, const signed char[::1] lane, const signed char[::1] kind, const int[::1] step, const short[::1] layer, const int[::1] expert, const double[::1] start_s, const double[::1] end_s, const long long[::1] nbytes, const long long[::1] target)

    @cython.locals(lane="long long", cpu_s=double, gpu_s=double, longer_s=double)
    cdef _end_layer_step(self, long long layer)

    @cython.locals(n="long long", step=int, gpu=int, layer=int, expert=int, event=int)
    cpdef _follow(self, const int[:, ::1] events)

    cdef _note_copy(self, int step, int gpu, int layer, int expert, int event)

    @cython.locals(n="long long", gpu="long long", own_step=bint)
    cdef _note_miss(self, int step, int layer, int expert)

    @cython.locals(n="long long", last_step=int)
    cdef _note_use(self, int step, long long gpu, int layer, int expert, int state)
