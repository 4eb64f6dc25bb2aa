cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment, flying
from moesim.policies.base cimport MachineView, Work

cdef double inf

cdef class Fiddler(SpreadAssignment):
    cdef public bint adds_compute
    cdef public int flags
    cdef unsigned char[::1] loaded
    @cython.locals(i=int, count=int, loads=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(gpu=int, best_s=double, load_s=double)
    cdef double _cost_s(self, Work work, int i) except? -1
