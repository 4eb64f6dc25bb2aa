from moesim.policies.assignment._placing cimport SpreadAssignment
from moesim.policies.base cimport Work

cdef class OnDemand(SpreadAssignment):
    pass
