cimport cython
from moesim.policies.assignment._list_scheduler cimport ListScheduler
from moesim.policies.assignment._placing cimport flying, transfer_s
from moesim.policies.base cimport AssignmentPolicy, MachineView, Work

cdef class HybriMoESchedule(AssignmentPolicy):
    cdef ListScheduler scheduler
    @cython.locals(scheduler=ListScheduler, g=int, i=int)
    cpdef int assign(self, Work work, MachineView view, signed char[::1] lanes, long long[::1] order) except? -1
