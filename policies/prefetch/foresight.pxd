cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.foresight cimport Foresight
from moesim.policies.prefetch._ranked cimport is_present
from moesim.policies.prefetch.recall cimport layer_s

cdef int NONE, RESIDENT, _STAGED, _COMES, _LEAVES, _NOBODY
cdef double _AHEAD, _ADVANCE

cdef class ForesightPrefetch(PrefetchPolicy):
    cdef public double decay, margin, tokens
    cdef public Foresight known
    cdef bint is_global
    cdef const long long[::1] slots
    cdef signed char[::1] role
    cdef long long[::1] leaving
    @cython.locals(each_s=double, start_s=double, begins_s=double, layer=int, step=int, count=Py_ssize_t, leaving=Py_ssize_t, _="long long", copy_s=double, best="long long", worst="long long", n=Py_ssize_t)
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(layer=int, _=int, best="long long")
    cdef Py_ssize_t _staged(self, Work work, MachineView view, long long[::1] named, Py_ssize_t count, double start_s, double each_s) except? -1
    @cython.locals(value="double[::1]", best="long long", first="long long", key="long long")
    cdef long long _wanted(self, MachineView view, int layer, int step) except? -3
    cdef bint _pays(self, long long best, long long worst) except? -1
    @cython.locals(value="double[::1]", first="long long", end="long long", worst="long long", taken="long long", key="long long", role=int)
    cdef long long _least_worth(self, MachineView view, int layer) except? -3
    @cython.locals(gpu=int)
    cdef bint _is_resident(self, MachineView view, long long key) except? -1
