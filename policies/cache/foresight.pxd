from moesim.policies.cache.ranked cimport OutscoringCache
from moesim.policies.foresight cimport Foresight

cdef class ForesightCache(OutscoringCache):
    cdef Foresight foresight
