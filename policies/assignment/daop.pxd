cimport cython
from moesim.policies.assignment._placing cimport SpreadAssignment
from moesim.policies.base cimport Gate, MachineView, Work
from moesim.policies.routing._substitute cimport Substitution

cdef double inf
cdef int IN_FLIGHT, PREFILL, SERIAL

cdef class DAOP(SpreadAssignment):
    cdef public int first_layer
    cdef public bint serial, cheapest, degrades
    cdef Substitution token
    @cython.locals(on_demand=bint)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
    @cython.locals(gpu=int, i=int, arrive_s=double)
    cdef _allow_cheap(self, Work work)
    @cython.locals(gpu=int, i=int)
    cdef _allow_arrivals(self, Work work)
    @cython.locals(token=Substitution, top_k=int, t=int, column=int, expert="long long")
    cpdef int precompute(self, Gate gate, MachineView view, unsigned short[::1] routing, int[::1] tokens) except? -1
