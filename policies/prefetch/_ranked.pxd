cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work

cdef int ABSENT, DECODE

@cython.locals(gpu=int)
cpdef bint is_present(MachineView view, long long key) except? -1

@cython.locals(count=Py_ssize_t, expert=Py_ssize_t, rank=Py_ssize_t, other="long long")
cpdef Py_ssize_t sort_wanted(const double[::1] value, const double[::1] second, long long[::1] ranked) except? -1

@cython.locals(considered="long long", n=Py_ssize_t, key="long long", absent=bint)
cpdef Py_ssize_t name_absent(MachineView view, long long layer, const long long[::1] ranked, long long size, bint refill, long long[::1] named, Py_ssize_t count) except? -1

cdef class PredictedWorkload(PrefetchPolicy):
    cdef public long long size, most
    cdef public bint refill, by_score, decode_only
    cdef double[::1] value, second
    cdef long long[::1] ranked
    @cython.locals(count=Py_ssize_t, depth=int, layer=int, expert=int, wanted="long long[::1]")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
