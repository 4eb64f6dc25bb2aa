cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work

cdef int PREFILL

cdef class WholeLayer(PrefetchPolicy):
    cdef public bint prefill_only
    @cython.locals(count=Py_ssize_t, expert=int, first="long long", key="long long")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
