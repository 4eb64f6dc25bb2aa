cdef class Block:
    cdef public object source
    cdef public int count, predictors
    cdef public const long long[::1] step, batch, rows, layer, phase, edges, row_edges, served_edges, drafted
    cdef public const int[::1] experts, tokens, served, served_tokens
    cdef public const unsigned short[:, ::1] routing
    cdef public const double[:, ::1] weights, scores, predicted
    cdef public const double[::1] mean_scores, first_scores, dense_s, gate_s, head_s, activation_s, draft_s
    cdef public const int[:, ::1] workload, drafts
    cdef public const float[:, ::1] score_sums
    cdef public int[::1] new_served, new_tokens
    cdef public long long[::1] new_edges
    cdef public signed char[::1] lane_of, state_of
    cdef public double[::1] start_s, end_s
