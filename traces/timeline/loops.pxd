cimport cython

cdef long long HIT
cdef long long MISS
cdef long long REFETCH_STEPS
cdef signed char _SETTLED
cdef signed char _UNUSED
cdef signed char _MISSED

@cython.locals(gpu="long long", layer="long long", expert="long long", step="long long", state="long long", last_step="long long", own_step=bint)
cpdef follow_copies(const long long[::1] copy_step, const long long[::1] copy_gpu, const long long[::1] copy_layer, const long long[::1] copy_expert, const long long[::1] is_prefetch, const long long[::1] access_step, const long long[::1] access_gpu, const long long[::1] access_layer, const long long[::1] access_expert, const long long[::1] access_state, long long[:, :, ::1] present_step, signed char[:, :, ::1] prefetch, long long[::1] counts)

@cython.locals(layers="long long", experts="long long", landed_s="double[:, :, ::1]", landed="long long[::1]", started_s="double[::1]", computed_s="double[:, ::1]", waits_s="double[::1]", row="long long", processor="long long", copy="long long", step="long long", idle_from_s=double, copied_s=double)
cpdef waits_of_lanes(const signed char[::1] lane, const short[::1] layer, const int[::1] expert, const double[::1] start_s, const double[::1] end_s, const long long[::1] place, const long long[::1] order, const long long[::1] copies, const long long[::1] target, const double[::1] plan_end_s)
