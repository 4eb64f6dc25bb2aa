cimport cython

cdef long long _PREFILL
cdef long long _DECODE
cdef long long HIT
cdef long long MISS
cdef long long REFETCH_STEPS
cdef signed char _SETTLED
cdef signed char _UNUSED
cdef signed char _MISSED

cdef class Books:
    cdef public long long steps
    cdef public long long batches
    cdef public double start_s
    cdef public double end_s
    cdef public long long[::1] tokens
    cdef public double[::1] seconds
    cdef public double[::1] speeds
    cdef public long long[::1] counted
    cdef long long batch
    cdef double last_s
    cdef long long prompt_tokens
    cdef public long long prompts
    cdef double prompt_s
    cdef double decode_start_s
    cdef long long alive
    cdef double made
    cdef double decoded_s
    @cython.locals(duration_s=double, each=double)
    cpdef long long follow(self, const long long[::1] phases, const long long[::1] batches, const long long[::1] tokens, const long long[::1] sequences, const double[::1] start_s, const double[::1] end_s, double[::1] gaps_s, double[::1] ttft_s, bint is_last) except? -1
    cdef long long _end_prefill(self, double[::1] ttft_s, long long prefills) except? -1
    cdef _end_sequences(self, long long alive)

@cython.locals(gpu="long long", layer="long long", expert="long long", step="long long", state="long long", last_step="long long", own_step=bint)
cpdef follow_copies(const long long[::1] copy_step, const long long[::1] copy_gpu, const long long[::1] copy_layer, const long long[::1] copy_expert, const long long[::1] is_prefetch, const long long[::1] access_step, const long long[::1] access_gpu, const long long[::1] access_layer, const long long[::1] access_expert, const long long[::1] access_state, long long[:, :, ::1] present_step, signed char[:, :, ::1] prefetch, long long[::1] counts)

@cython.locals(layers="long long", experts="long long", landed_s="double[:, :, ::1]", landed="long long[::1]", started_s="double[::1]", computed_s="double[:, ::1]", waits_s="double[::1]", row="long long", processor="long long", copy="long long", step="long long", idle_from_s=double, copied_s=double)
cpdef waits_of_lanes(const signed char[::1] lane, const short[::1] layer, const int[::1] expert, const double[::1] start_s, const double[::1] end_s, const long long[::1] place, const long long[::1] order, const long long[::1] copies, const long long[::1] target, const double[::1] plan_end_s)

cpdef sum_by_lane(const signed char[::1] lane, const double[::1] start_s, const double[::1] end_s, const long long[::1] place, const double[::1] waits_s, double[:, ::1] busy_s, double[::1] waited_s)

@cython.locals(last="long long")
cpdef long long number_in_order(const long long[::1] key, const unsigned char[::1] chosen, long long[::1] place) except? -1
