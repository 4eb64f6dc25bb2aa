cimport cython
from moesim.policies.assignment._contended cimport PlannedInTime
from moesim.policies.assignment._list_scheduler cimport ListScheduler
from moesim.policies.assignment._placing cimport flying, transfer_s
from moesim.policies.base cimport Work

cdef class HybriMoESchedule(PlannedInTime):
    cdef ListScheduler scheduler
    @cython.locals(scheduler=ListScheduler, g=int, i=int)
    cpdef plan(self, Work work, signed char[::1] lanes, long long[::1] order)
