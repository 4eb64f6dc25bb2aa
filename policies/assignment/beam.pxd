cimport cython
from moesim.policies.assignment._placing cimport by_gap
from moesim.policies.base cimport AssignmentPolicy, MachineView, Work

cdef int CPU

cdef class Beam(AssignmentPolicy):
    cdef public int width
    cdef double[::1] gap_s, end_s, sum_s, added_s
    cdef double[:, ::1] load_s, parent_load_s
    cdef unsigned char[:, ::1] waited, parent_waited
    cdef long long[:, ::1] parent
    cdef signed char[:, ::1] chosen
    @cython.locals(lane=int, beams=int, n=int, rank=int, load_s="double[:, ::1]", waited="unsigned char[:, ::1]")
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(lanes=int, kept=int, child=int, parent=int, lane=int, other=int, rank=int, j=int, added_s=double, lane_s=double, makespan_s=double, total_s=double)
    cdef int _choose(self, Work work, int n, int i, int beams) except -1
    cdef bint _is_better(self, double makespan_s, double total_s, int rank) except -1
    cdef double _added_s(self, Work work, int i, int parent, int lane) except? -1
    @cython.locals(parent=int, lane=int)
    cdef _follow(self, Work work, int n, int i, int rank)
