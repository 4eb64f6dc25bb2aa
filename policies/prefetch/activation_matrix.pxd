cimport cython
from libc cimport math
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport is_present
from moesim.policies.ranking cimport best_of

cdef int NONE
cdef double _SMALLEST

cdef class ActivationMatrix(PrefetchPolicy):
    cdef public int layers, experts, batch
    cdef public long long size, capacity, kept, calibrated
    cdef public bint by_prefix, names_all
    cdef double[:, ::1] counts, lengths, cosines
    cdef double[::1] similarity, matches, running, value
    cdef unsigned char[::1] wanted
    cdef long long[::1] best
    @cython.locals(following=int, wants=bint, similar="long long", first="long long", places="long long", n="long long", depth="long long", count=double, taken=Py_ssize_t)
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    cdef long long _name_all(self, long long first, long long places, long long[::1] named) except? -1
    @cython.locals(most=double, key="long long", layer=int, n="long long")
    cdef _finish(self)
    @cython.locals(place="long long", other="long long", layer=int, squares=double, key="long long", count=double)
    cdef _store(self)
    @cython.locals(layer=int, i=int, squares=double, key="long long", length=double, n="long long", share=double)
    cdef _observe(self, Work work)
    @cython.locals(n="long long", layer=int, best="long long")
    cdef long long _most_similar(self, int first, int end) except? -1
