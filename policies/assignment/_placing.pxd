cimport cython
from moesim.policies.base cimport AssignmentPolicy, Work

cdef double inf
cdef int CPU, IN_FLIGHT

cpdef bint flying(Work work, int gpu, int i) except -1
@cython.locals(arrive_s=double)
cpdef double transfer_s(Work work, int gpu, int i) except? -1
@cython.locals(i=int, j=int, gpu=int, best_s=double)
cpdef by_gap(Work work, double[::1] gap_s, long long[::1] order)

cdef class SpreadAssignment(AssignmentPolicy):
    cdef public unsigned char[:, ::1] allowed
    cdef double[::1] load_s, waited_s
    @cython.locals(gpu=int)
    cdef allow(self, Work work, int i)
    @cython.locals(gpu=int, i=int)
    cdef allow_all(self, Work work, bint allowed)
    @cython.locals(gpu=int, i=int)
    cdef allow_residents(self, Work work)
    @cython.locals(gpu=int, i=int)
    cdef spread(self, Work work, signed char[::1] lanes)
    @cython.locals(gpu=int, chosen=int, end_s=double, arrive_s=double, lane_s=double)
    cdef int _fastest(self, Work work, int i) except -1
