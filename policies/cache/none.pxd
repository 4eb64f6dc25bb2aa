from moesim.policies.cache._own_replacements cimport NoAdmissionCache

cdef class NoCache(NoAdmissionCache):
    pass
