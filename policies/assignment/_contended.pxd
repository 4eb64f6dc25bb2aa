cimport cython
from moesim.policies.assignment._placing cimport flying, transfer_s
from moesim.policies.base cimport AssignmentPolicy, MachineView, Work

cdef double _SOONER, inf
cdef int CPU

cdef class PlannedInTime(AssignmentPolicy):
    cdef public double link_factor, cpu_factor
    cdef bint slows
    cdef Work imagined
    cdef double[::1] cpu_s, link_s, copied_s, gpu_end_s
    cdef double[:, ::1] arrive_s
    cdef signed char[::1] lanes
    cdef long long[::1] order
    cpdef plan(self, Work work, signed char[::1] lanes, long long[::1] order)
    @cython.locals(least_s=double, end_s=double, copies=int, i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(i=int)
    cdef bint _copies(self, Work work, signed char[::1] lanes) except -1
    cdef bint _is_absent(self, Work work, int gpu, int i) except -1
    @cython.locals(imagined=Work, cpu_factor=double, link_factor=double, i=int, g=int)
    cdef _imagine(self, Work work, bint copies)
    @cython.locals(g=int, cpu_s=double, cpu_end_s=double, last_s=double)
    cpdef double end_s(self, Work work, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(cpu_s=double, g=int, i=int)
    cdef double _add_up(self, Work work, signed char[::1] lanes) except? -1
    @cython.locals(n=int, i="long long", g=int, copied_s=double, lands_s=double)
    cdef _compute_arrivals(self, Work work, signed char[::1] lanes, long long[::1] order, double cpu_end_s)
    @cython.locals(now_s=double, busy=int, next_s=double, link_end_s=double, slowdown=double, g=int, _=int)
    cdef double _cpu_end_s(self, double cpu_s, int gpus) except? -1
    cdef double _lands_s(self, double copied_s, double cpu_end_s) except? -1
