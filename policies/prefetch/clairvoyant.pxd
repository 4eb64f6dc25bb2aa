cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work

cdef class Clairvoyant(PrefetchPolicy):
    cdef public long long depth
    @cython.locals(count=Py_ssize_t, n=int, first="long long", place="long long")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
