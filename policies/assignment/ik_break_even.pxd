from moesim.policies.assignment._placing cimport SpreadAssignment

cdef class IkBreakEven(SpreadAssignment):
    cdef public long long min_batch, top_k, enough
