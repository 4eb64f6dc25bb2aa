cimport cython
from moesim.policies.assignment._placing cimport by_gap
from moesim.policies.base cimport AssignmentPolicy, MachineView, Work

cdef int CPU

cdef class Greedy(AssignmentPolicy):
    cdef public long long limit
    cdef double[::1] gap_s, load_s, waited_s
    cdef long long[::1] staging_left
    @cython.locals(lane=int, n=int, i=int, gpu=int, end_s=double, arrive_s=double, cost_s=double)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
