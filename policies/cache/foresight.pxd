from moesim.policies.ranked_cache cimport OutscoringCache
from moesim.policies.foresight cimport Foresight

cdef class ForesightCache(OutscoringCache):
    cdef Foresight foresight
