cimport cython
from moesim.policies.assignment._optimum cimport OptimumSearch
from moesim.policies.base cimport AssignmentPolicy, MachineView, Work

cdef class Exact(AssignmentPolicy):
    cdef OptimumSearch one, several
    @cython.locals(search=OptimumSearch, i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
