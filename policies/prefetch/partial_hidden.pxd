cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport name_absent
from moesim.policies.ranking cimport best_of

cdef int PREFILL

cdef class PartialHidden(PrefetchPolicy):
    cdef public long long size
    cdef public bint by_maximum, preloads
    cdef double[::1] merged
    cdef unsigned char[::1] wanted
    cdef long long[::1] ranked
    @cython.locals(layer=int, expert=int, ranked="long long[::1]")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(merged=double, t=int, score=double)
    cdef double _merged(self, MachineView view, int expert) except? -1.0
