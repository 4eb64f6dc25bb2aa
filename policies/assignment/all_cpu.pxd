from moesim.policies.base cimport AssignmentPolicy

cdef class AllCPU(AssignmentPolicy):
    pass
