cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport is_present

cdef long long _IN_TIME

cdef class DraftedPrefetch(PrefetchPolicy):
    cdef public double accuracy
    cdef public long long until
    @cython.locals(count=Py_ssize_t, reached=Py_ssize_t, layer=int, n=int, expert=int, key="long long", landed_s=double)
    cpdef long long foretold(self, const int[:, ::1] predicted, double draft_s, MachineView view, long long[::1] named) except? -1
