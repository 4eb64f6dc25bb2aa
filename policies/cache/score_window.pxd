cimport cython
from moesim.policies.base cimport Work
from moesim.policies.ranked_cache cimport RankedCache

cdef class ScoreWindow(RankedCache):
    cdef public int window
    cdef public double now
    cdef double[:, ::1] ring
    cdef long long[::1] seen
    @cython.locals(seen="long long", newest=int, rows=int, expert=int, row=int, key="long long", total=double)
    cdef _roll(self, Work work)
