cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.cache.mrs cimport mix
from moesim.policies.prefetch._ranked cimport name_absent
from moesim.policies.ranking cimport best_of

cdef int ABSENT, DECODE

cdef class HybriMoEReleased(PrefetchPolicy):
    cdef public long long size
    cdef public double alpha
    cdef double[::1] score
    cdef long long[::1] mixed, ranked
    cdef unsigned char[::1] wanted
    @cython.locals(uses_gpu=bint, i=int, layer=int, first="long long", expert=int, recent="double[::1]", ranked="long long[::1]")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
