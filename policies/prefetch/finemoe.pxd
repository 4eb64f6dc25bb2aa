cimport cython
from libc cimport math
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport is_present

cdef double _SMALLEST

cdef class FineMoE(PrefetchPolicy):
    cdef public int layers, experts, top_k
    cdef public long long distance, capacity, kept
    cdef double[::1] expected, running, products, lengths, unlikely
    cdef double[:, ::1] maps, squares
    cdef double running_square, cosine
    cdef long long best
    @cython.locals(layer="long long", first="long long", expert=int, share=double, least=double, taken=double, count=Py_ssize_t, chosen=int)
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(key="long long", n="long long", total=double, expert=int, share=double)
    cdef _observe(self, Work work)
    @cython.locals(n="long long", length=double, cosine=double)
    cdef _search(self)
    @cython.locals(place="long long", layer="long long", key="long long", square=double, share=double)
    cdef _keep(self)
    @cython.locals(best=int, expert=int)
    cdef int _likeliest(self) except? -1
