cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment
from moesim.policies.base cimport MachineView, Work

cdef int PREFILL, RESIDENT, MOST_TOKENS
cdef double SMALLEST

cdef class SplitPlan:
    cdef int experts, top_k
    cdef bint undivided
    cdef const double[::1] popularity, copy_table
    cdef const double[:, ::1] cpu_table, gpu_table
    cdef const long long[::1] ranked
    cdef double[::1] cpu_s, gpu_s, copy_s
    cdef public unsigned char[:, ::1] on_gpu
    cdef unsigned char[:, ::1] made
    cdef long long[::1] tokens
    @cython.locals(row=int)
    cpdef int plan(self, int phase, int layer, int rows, MachineView view) except -1
    @cython.locals(expert=int, mean=int, popularity=double, chosen=double, active=double, workload=double)
    cdef _estimate(self, int layer, long long tokens)
    @cython.locals(first="long long", cpu_total_s=double, gpu_total_s=double, absent=int, expert="long long", gpu=int, resident=bint, link_s=double, least_s=double, streamed=int, n=int, place=int, slowest_s=double)
    cdef _search(self, int row, int layer, MachineView view)

cdef class MoELightning(SpreadAssignment):
    cdef SplitPlan split
    @cython.locals(split=SplitPlan, row=int, i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
