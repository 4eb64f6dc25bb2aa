cimport cython
from moesim.policies.assignment.moe_lightning cimport SplitPlan
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport is_present

cdef class MoELightning(PrefetchPolicy):
    cdef SplitPlan split
    @cython.locals(layer=int, row=int, first="long long", count=Py_ssize_t, key="long long")
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
