from moesim.policies.base cimport RoutingPolicy

cdef class AsRecorded(RoutingPolicy):
    pass
