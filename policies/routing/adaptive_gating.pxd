cimport cython
from moesim.policies.base cimport Gate, MachineView, RoutingPolicy

cdef int DECODE, UNUSED

cdef class AdaptiveGating(RoutingPolicy):
    cdef public bint normalises
    cdef const double[::1] threshold
    @cython.locals(top_k=int, t=int, column=int, drops=bint, threshold=double, total=double)
    cpdef int route(self, Gate gate, MachineView view, unsigned short[::1] routing) except? -1
