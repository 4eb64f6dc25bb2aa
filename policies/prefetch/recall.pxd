cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport is_present
from moesim.policies.routing_memory cimport RoutingMemory

cdef int RESIDENT
cdef double _AHEAD, _WORTH, _SHARE_ON_CPU

@cython.locals(seconds=double, i=int)
cpdef double layer_s(Work work, MachineView view) except? -1.0

cdef class Recall(PrefetchPolicy):
    cdef public long long depth
    cdef public double least, trust, advance
    cdef public RoutingMemory memory
    cdef public double[::1] price
    @cython.locals(memory=RoutingMemory, each_s=double, begins_s=double, start_s=double, is_trusted=bint, count=Py_ssize_t, last="long long", layer=int, absent=Py_ssize_t, copy_s=double, needed_s=double, _=Py_ssize_t)
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(by_chance=double, kept=double)
    cdef bint _is_trusted(self, Work work, MachineView view) except? -1
    @cython.locals(memory=RoutingMemory, first="long long", least=double, end=Py_ssize_t, key="long long", uses=double, place=Py_ssize_t)
    cdef Py_ssize_t _candidates(self, MachineView view, int layer, long long[::1] named, Py_ssize_t count) except? -1
