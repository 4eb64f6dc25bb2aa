cimport cython
from moesim.policies.base cimport Gate, MachineView
from moesim.policies.routing._substitute cimport SubstitutingRouting, Substitution

cdef int DECODE

cdef class GracefulDegradation(SubstitutingRouting):
    cdef public int first_layer
    cdef public bint by_prediction
    @cython.locals(top_k=int, t=int, column=int, predicted=bint, token=Substitution)
    cpdef int route(self, Gate gate, MachineView view, unsigned short[::1] routing) except? -1
