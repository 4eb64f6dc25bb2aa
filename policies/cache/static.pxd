from moesim.policies.cache._own_replacements cimport NoAdmissionCache

cdef class Static(NoAdmissionCache):
    pass
