cdef class MachineView:
    cdef public int layers, experts, gpus
    cdef public double first_cpu_s, gap_s, link_wait_s
    cdef public const signed char[:, ::1] states
    cdef public const double[::1] copy_s
    cdef public const double[:, ::1] cpu_s, gpu_s
    cdef public const unsigned short[:, ::1] routing, before, before_that
    cdef public const int[:, ::1] workload
    cdef public const float[:, ::1] score_sums
    cdef public const double[:, ::1] predicted
    cdef public const int[::1] coming
    cdef public const long long[::1] coming_edges

cdef class Work:
    cdef public int step, layer, phase, batch, rows, active, gpus
    cdef public long long first
    cdef public double first_cpu_s
    cdef public const int[::1] experts, tokens
    cdef public const signed char[::1] state
    cdef public const double[::1] cpu_s, host_s, link_s
    cdef public const double[:, ::1] gpu_s, arrive_s
    cdef public const signed char[:, ::1] gpu_state
    cdef public const double[::1] scores, first_scores
    cdef public const int[::1] ranks

cdef class Gate:
    cdef public int step, layer, phase, rows
    cdef public const unsigned short[:, ::1] experts
    cdef public const double[:, ::1] weights, scores, predicted

cdef class Policy:
    cdef dict __dict__
    cdef object __weakref__

cdef class AssignmentPolicy(Policy):
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    cpdef int precompute(self, Gate gate, MachineView view, unsigned short[::1] routing, int[::1] tokens) except? -1

cdef class PrefetchPolicy(Policy):
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    cpdef long long foretold(self, const int[:, ::1] predicted, double draft_s, MachineView view, long long[::1] named) except? -1

cdef class CachePolicy(Policy):
    cpdef accessed(self, Work work)
    cpdef bint admits(self, Work work, long long key) except? -1
    cpdef precedence(self, long long[::1] incoming)
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
    cpdef admitted(self, long long key)
    cpdef evicted(self, long long key)
    cpdef long long replacements(self, Work work, const signed char[::1] states, long long[::1] outgoing, long long[::1] incoming) except? -1

cdef class RoutingPolicy(Policy):
    cpdef int route(self, Gate gate, MachineView view, unsigned short[::1] routing) except? -1

cdef int IN_FLIGHT, RESIDENT, NONE
