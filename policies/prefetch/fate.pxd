cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport name_absent, sort_wanted
from moesim.policies.ranking cimport best_of

cdef int DECODE

cdef class Fate(PrefetchPolicy):
    cdef int top_k
    cdef double[::1] predicted, tokens, scores
    cdef unsigned char[::1] every
    cdef long long[::1] best, ranked
    @cython.locals(layer=int, wanted=int, expert="long long", t=int, n=int, ranked="long long[::1]")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(seconds=double, i=int, copy_s=double)
    cdef int _copies_of_a_layer(self, Work work, MachineView view) except? -1
